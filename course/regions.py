"""The marked places in the source that students write: found, and taken out."""

import re
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from step0_monolith.options import RunError

BEGIN = re.compile(r"# BEGIN SOLUTION (step\d\.[a-z][a-z0-9_]*)")
END = "# END SOLUTION"
WORD = "SOLUTION"


class RegionError(RunError):
    """Marks that do not fit together; the message has file and line."""


class Region(NamedTuple):
    """One place. first, last: the lines of its two marks, from 1. indent: blanks before them."""

    name: str
    path: Path
    first: int
    last: int
    indent: int


def regions_of(path: Path, root: Path) -> list[Region]:
    """The regions of a Python file, in its order.

    Raises RegionError for a region inside another, one without an end, an end without a begin, and a mark that is
    spelt wrongly.
    """
    name = path.relative_to(root)
    found: list[Region] = []
    opened: tuple[str, int, int] | None = None
    for line, column, text in _marks(path):
        begins = BEGIN.fullmatch(text)
        if begins and opened is not None:
            raise RegionError(f"{name}:{line}: {begins[1]} begins inside {opened[0]}, which began in line {opened[1]}")
        if begins:
            opened = (begins[1], line, column)
        elif text != END:
            raise RegionError(f"{name}:{line}: {text!r} is neither '# BEGIN SOLUTION stepN.name' nor '{END}'")
        elif opened is None:
            raise RegionError(f"{name}:{line}: '{END}' without a region that it could end")
        else:
            found.append(Region(opened[0], path, opened[1], line, opened[2]))
            opened = None
    if opened is not None:
        raise RegionError(f"{name}:{opened[1]}: {opened[0]} has no '{END}'")
    return found


def _marks(path: Path) -> list[tuple[int, int, str]]:
    """(line, column, text) of the comments that speak of a solution. Raises RegionError where there is no Python."""
    try:
        with tokenize.open(path) as file:
            comments = [token for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT]
    except (SyntaxError, tokenize.TokenError) as error:
        raise RegionError(f"{path}: cannot be read as Python: {error}") from None
    return [(*token.start, token.string.strip()) for token in comments if WORD in token.string.upper()]


def all_regions(root: Path, names: Iterable[str]) -> dict[str, Region]:
    """The regions of all steps by name, in the order of the files.

    names: of the tasks that the course knows. Raises RegionError as `regions_of`, and for a name that two regions have,
    one that is no task, and a task without a region.
    """
    known, found = set(names), {}
    for path in sorted(root.glob("step[0-9]_*/**/*.py")):
        for region in regions_of(path, root):
            place = f"{path.relative_to(root)}:{region.first}"
            if region.name in found:
                other = found[region.name]
                raise RegionError(f"{place}: {region.name} is in {other.path.relative_to(root)}:{other.first} too")
            if region.name not in known:
                raise RegionError(f"{place}: {region.name} is no task of course.toml")
            found[region.name] = region
    missing = sorted(known - set(found))
    if missing:
        raise RegionError(f"course.toml has the task {missing[0]}, and no file has a region of that name")
    return found


def replaced(text: str, regions: Iterable[Region], body: Callable[[Region], list[str]]) -> str:
    """A file's text with other lines in place of some of its regions, marks included.

    body: gives a region's new lines, without indent.
    """
    lines = text.splitlines(keepends=True)
    for region in sorted(regions, key=lambda each: -each.first):
        new = [f"{' ' * region.indent}{line}".rstrip() + "\n" for line in body(region)]
        lines[region.first - 1 : region.last] = new
    return "".join(lines)
