"""Reads the commands with their output, the links and the flags out of the lesson pages, and compares output."""

import difflib
import doctest
import re
import shlex
from dataclasses import dataclass, field

FENCE = re.compile(r"^```(.*)$")
COMMENT = re.compile(r"^<!--\s*(.*?)\s*-->$")
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|<(?:img|a)\s[^>]*(?:src|href)=\"([^\"]+)\"")
FLAG = re.compile(r"(?<![\w!-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])")  # not the arrow in `a --b--> c`
CHECKER = doctest.OutputChecker()


class BadLesson(ValueError):
    """A page that cannot be checked as it is written; the message names page and line."""


@dataclass
class Block:
    """One command of a lesson, and what it prints (`...` stands for any text)."""

    page: str
    line: int
    command: list[str]
    expected: str
    slow: bool = False
    status: int = 0

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Page:
    """A lesson page: its console blocks, and its text without them."""

    blocks: list[Block] = field(default_factory=list)
    text: str = ""


def read_page(name: str, text: str) -> Page:
    """Splits a page into its console blocks and the rest; raises BadLesson."""
    page, rest = Page(), []
    lines = iter(enumerate(text.splitlines(), start=1))
    comments: list[str] = []
    for number, line in lines:
        fence, comment = FENCE.match(line), COMMENT.match(line)
        if line.strip().startswith("```console") and not fence:
            raise BadLesson(f"{name}:{number}: a console block is not indented")
        if fence and fence[1].strip() == "console":
            body = []
            for _, inner in lines:
                if FENCE.match(inner):
                    break
                body.append(inner)
            else:
                raise BadLesson(f"{name}:{number}: the console block has no end")
            page.blocks.append(_block(name, number, body, comments))
        else:
            rest.append(line)
        if comment:
            comments.append(comment[1])
        elif line.strip():
            comments = []
    page.text = "\n".join(rest)
    return page


def _block(name: str, number: int, body: list[str], comments: list[str]) -> Block:
    where = f"{name}:{number}"
    if not body or not body[0].startswith("$ "):
        raise BadLesson(f"{where}: the first line of a console block is '$ ' and a command")
    if any(line.startswith("$ ") for line in body[1:]):
        raise BadLesson(f"{where}: a console block holds one command")
    try:
        command = shlex.split(body[0][2:])
    except ValueError as error:
        raise BadLesson(f"{where}: {error}") from None
    block = Block(name, number, command, "".join(line.rstrip() + "\n" for line in body[1:]))
    if not command or command[0] not in ("python", "torchrun", "make"):
        raise BadLesson(f"{where}: the command starts with python, torchrun or make, not {body[0]!r}")
    for comment in comments:
        if comment == "slow":
            block.slow = True
        elif status := re.fullmatch(r"status: (\d+)", comment):
            block.status = int(status[1])
        else:
            raise BadLesson(f"{where}: <!-- {comment} --> means nothing; known are 'slow' and 'status: N'")
    if "..." in block.expected and not re.search(r"\w", block.expected.replace("...", "")):
        raise BadLesson(f"{where}: expected output of nothing but '...' compares nothing")
    return block


def matches(expected: str, printed: str) -> bool:
    """Whether a text is as expected, as doctest's ELLIPSIS has it, but `0....` is a figure whose decimals vary.

    (doctest takes the first three of the four dots for its mark and would wait for a full stop at the end.)
    """
    return CHECKER.check_output(re.sub(r"\.{4,}", "...", expected), printed, doctest.ELLIPSIS)


def difference(expected: str, printed: str) -> str:
    """Empty when the output is as expected; otherwise both, line by line."""
    printed = "".join(line.rstrip() + "\n" for line in printed.splitlines())
    if matches(expected, printed):
        return ""
    wanted = expected.splitlines()
    patterns = [line for line in wanted if line.strip() != "..."]

    def as_written(line: str) -> str:
        """The lesson's line that this line matches, so that what `...` allows does not show up as different."""
        return next((p for p in patterns if matches(p + "\n", line + "\n")), line)

    got = [as_written(line) for line in printed.splitlines()]
    diff = difflib.unified_diff(wanted, got, "the lesson", "the command", lineterm="", n=100)
    return "\n".join(diff) + f"\n\nprinted in full:\n{printed}"


def links(text: str) -> list[str]:
    """The relative links and pictures of a page, without anchors."""
    found = [first or second for first, second in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))]
    return [link.split("#")[0] for link in found if not re.match(r"[a-z]+:|#", link)]


def modules(text: str) -> set[str]:
    """Every module of a step that a page's text runs with `-m`."""
    return set(re.findall(r"-m (step\d\w*(?:\.\w+)*)", text))


def flags(text: str) -> set[str]:
    """Every `--flag` that a page's text mentions."""
    return set(FLAG.findall(text))
