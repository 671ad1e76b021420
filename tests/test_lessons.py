"""Each command in a lesson prints what the lesson says; its links lead somewhere; its flags exist."""

import importlib
import pkgutil
import shutil

import pytest
from torch.distributed.run import get_args_parser

from step0_monolith.options import Options, flag_of
from tests.lessons import BadLesson, Block, Page, difference, flags, links, modules, read_page
from tests.ranks import ROOT, run_command

STEP_FOLDERS = sorted(path for path in ROOT.glob("step[0-9]_*") if (path / "__init__.py").exists())
PAGES = ["README.md", *(f"{f.parent.name}/{f.name}" for step in STEP_FOLDERS for f in sorted(step.glob("*.md")))]
LIMIT = 100
SLOW_LIMIT = 500
# Of programs that are not ours and that a page may mention.
OTHER_FLAGS = {"--help", "--index-url", "--extra-index-url", "--find-links", "--no-index"}


def text_of(name: str) -> str:
    """A page's text, empty when there is no such page: test_page_can_be_checked says so once."""
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def page_of(name: str) -> Page:
    return read_page(name, text_of(name))


def blocks() -> list:
    """All commands; a page that is missing or malformed is left to test_page_can_be_checked."""
    found = []
    for name in PAGES:
        try:
            page = page_of(name)
        except BadLesson:
            continue
        for block in page.blocks:
            marks = [pytest.mark.slow, pytest.mark.timeout(SLOW_LIMIT + 30)] if block.slow else []
            found.append(pytest.param(block, id=block.id, marks=marks))
    return found


@pytest.fixture(scope="session")
def copy(tmp_path_factory):
    """The repository without what is ignored, so that a lesson's commands write their files elsewhere."""
    folder = tmp_path_factory.mktemp("lessons") / "course"
    skip = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "*.egg-info", "out", "build")
    return shutil.copytree(ROOT, folder, ignore=skip)


@pytest.mark.parametrize("name", PAGES)
def test_page_can_be_checked(name):
    assert (ROOT / name).exists(), f"{name} is missing"
    # RESULTS.md is written by the program that it names.
    written = ("README.md", "step6_schedules/RESULTS.md")
    assert page_of(name).blocks or name in written, f"{name} shows no command with its output"


@pytest.mark.parametrize("block", blocks())
def test_command_prints_what_the_lesson_says(block: Block, copy):
    if block.command[0] == "make":  # it would run the tests or the set-up again; that the target exists must do
        ran = run_command(["make", "-n", *block.command[1:]], cwd=copy, environment={"MAKEFLAGS": ""})
        assert ran.status == 0, ran.text
        return
    ran = run_command(block.command, limit=SLOW_LIMIT if block.slow else LIMIT, cwd=copy)
    assert ran.status == block.status, f"exit status {ran.status}, not {block.status}\n{ran.text}"
    if wrong := difference(block.expected, ran.stdout if block.status == 0 else ran.text):
        pytest.fail(f"{block.id}\n{wrong}\n{ran.stderr if block.status == 0 else ''}", pytrace=False)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    folder = (ROOT / name).parent
    assert not [link for link in links(text_of(name)) if not (folder / link).exists()]


@pytest.mark.parametrize("name", PAGES)
def test_modules_exist(name):
    paths = [ROOT / module.replace(".", "/") for module in modules(text_of(name))]
    assert not [path for path in paths if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()]


def known_flags() -> set[str]:
    """The flags of all programs of the steps, and those of torchrun."""
    for folder in STEP_FOLDERS:
        for module in pkgutil.iter_modules([str(folder)], folder.name + "."):
            importlib.import_module(module.name)
    classes, known = [Options], set(OTHER_FLAGS)
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        known |= {flag_of(name) for name in getattr(cls, "__dataclass_fields__", {})}
    for action in get_args_parser()._actions:
        known |= set(action.option_strings)
    return known


def test_flags_exist():
    known = known_flags()
    assert {"--num-layers", "--nproc-per-node"} <= known
    assert not {name: unknown for name in PAGES if (unknown := flags(page_of(name).text) - known)}


GOOD = """\
# Title

<!-- slow -->
<!-- status: 1 -->
```console
$ python -m thing --result "a b.json"
loss 0.12...
...
weights sha256 ...
```

Then `--some-flag`, `python -m step9_x.y` and [a link](other/page.md#part), ![picture](plot.png),
a --b--> c, [out](https://example.org), [here](#title), <img src="x.svg">.
"""


def test_a_page_is_read():
    page = read_page("p.md", GOOD)
    (block,) = page.blocks
    assert block.command == ["python", "-m", "thing", "--result", "a b.json"]
    assert (block.slow, block.status, block.id) == (True, 1, "p.md:5")
    assert flags(page.text) == {"--some-flag"}
    assert modules(page.text) == {"step9_x.y"}
    assert links(page.text) == ["other/page.md", "plot.png", "x.svg"]


@pytest.mark.parametrize(
    ("printed", "equal"),
    [
        ("loss 0.1234\nanything\nat all\nweights sha256 99\n", True),
        ("loss 0.1234\n\nweights sha256 99\n", True),
        ("loss 0.1334\nanything\nweights sha256 99\n", False),
        ("weights sha256 99\nanything\nloss 0.1234\n", False),
        ("loss 0.1234\nanything\n", False),
        ("loss 0.1234\nanything\nweights sha256 99\nmore\n", False),
        ("", False),
    ],
)
def test_output_is_compared(printed, equal):
    (block,) = read_page("p.md", GOOD.replace("sha256 ...", "sha256 99")).blocks
    assert (difference(block.expected, printed) == "") == equal


def test_a_difference_shows_only_what_differs():
    assert not difference("loss 0....\n", "loss 0.1234\n")
    wrong = difference("loss 0.1...\naccuracy 0.96\n", "loss 0.1234\naccuracy 0.95\n").split("\n\n")[0]
    assert wrong.splitlines()[3:] == [" loss 0.1...", "-accuracy 0.96", "+accuracy 0.95"]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("$ python", "python", "first line"),
        ("loss 0.12...", "$ python again", "one command"),
        ("$ python -m", "$ rm -r", "not '. rm"),
        ('b.json"', "b.json", "quotation"),
        ("```console", "  ```console", "indented"),
        ("<!-- slow -->", "<!-- solw -->", "means nothing"),
        ("loss 0.12...\n...\nweights sha256 ...", "...", "compares nothing"),
        ("sha256 ...\n```", "sha256 ...", "no end"),
    ],
)
def test_a_page_that_cannot_be_checked_is_refused(old, new, word):
    with pytest.raises(BadLesson, match=word):
        read_page("p.md", GOOD.replace(old, new))
