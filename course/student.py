"""python -m course.student DEST: writes a repository of the student's own, with places to write in it."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from course.places import place_for
from course.regions import Region, all_regions, replaced
from course.tasks import Task, read_tasks
from step0_monolith.options import RunError, UsageError, run_program

ROOT = Path(__file__).resolve().parents[1]
# What only teachers need, or what shows solutions.
LEFT_OUT = (".ci/*", "course/student.py", "tests/test_repository_*.py", "tests/test_course_*.py")
NOT_SOURCE = {".git", ".venv", "out", "build", "__pycache__", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}
FOLDED = re.compile(r"<details>.*?</details>\n?", re.DOTALL)
# A line of a solution that is at least so long and nowhere else in the repository gives the solution away.
TELLING = 24
AUTHOR = ("-c", "user.name=course", "-c", "user.email=course@localhost")


def files_of(root: Path) -> list[Path]:
    """All files that belong to the repository, relative to it: those that git tracks, or all but what is made."""
    try:
        ran = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
        names = [name.decode() for name in ran.stdout.split(b"\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = []
    if not names:  # an archive, without git's memory
        names = [str(path.relative_to(root)) for path in root.rglob("*") if not NOT_SOURCE & set(path.parts)]
    return sorted(Path(name) for name in names if (root / name).is_file())


def stripped(notebook: str) -> str:
    """A notebook's text without outputs."""
    content = json.loads(notebook)
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def students_text(path: Path, root: Path, regions: Sequence[Region], tasks: Mapping[str, Task]) -> str | None:
    """A file as the student gets it; None for one that is copied as it is. Raises RunError if it would not compile."""
    if path.suffix == ".ipynb":
        return stripped((root / path).read_text(encoding="utf-8"))
    if path.suffix == ".md":
        return FOLDED.sub("", (root / path).read_text(encoding="utf-8"))
    own = [region for region in regions if region.path == root / path]
    if not own:
        return None
    text = (root / path).read_text(encoding="utf-8")
    text = replaced(text, own, lambda region: place_for(tasks[region.name], path.parts[0]))
    try:
        compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise RunError(f"{path}:{error.lineno}: does not compile without its solutions: {error.msg}") from None
    return text


def telling_lines(root: Path, files: Sequence[Path], regions: Sequence[Region]) -> set[str]:
    """Lines of solutions that are long, and in no place of the repository but solutions."""
    lines, spans = set(), {}
    for region in regions:
        own = region.path.read_text(encoding="utf-8").splitlines()
        lines |= {line.strip() for line in own[region.first : region.last - 1] if len(line.strip()) >= TELLING}
        spans.setdefault(region.path, []).append(region)
    for path in files:
        if path.suffix != ".py" or is_left_out(path):
            continue
        for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), 1):
            if not any(region.first < number < region.last for region in spans.get(root / path, ())):
                lines -= {each for each in lines if each in line}
    return lines


def is_left_out(path: Path) -> bool:
    """Whether students do not get a file."""
    return any(fnmatch.fnmatch(path.as_posix(), pattern) for pattern in LEFT_OUT)


def write_copy(dest: Path, root: Path = ROOT) -> dict[str, Task]:
    """Writes the student's repository to `dest`, whole or not at all; returns the tasks.

    Raises UsageError where something is in `dest` already, or where it lies inside the repository, and RunError when a
    line of a solution would be left in the copy.
    """
    dest = Path(os.path.abspath(dest))
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise UsageError(f"DEST {str(dest)!r} is not empty; name a folder that is not there yet")
    if dest.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"DEST {str(dest)!r} lies inside the course itself; name a folder elsewhere")
    tasks = read_tasks(root / "course" / "course.toml")
    regions = list(all_regions(root, tasks).values())
    files = files_of(root)
    telling = telling_lines(root, files, regions)
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}-") as folder:
            part = Path(folder) / "copy"
            for path in files:
                if not is_left_out(path):
                    _write(path, root, part, students_text(path, root, regions, tasks), telling)
            _remember(part)
            if dest.exists():
                dest.rmdir()
            part.rename(dest)
    except OSError as error:
        raise RunError(f"DEST {str(dest)!r} cannot be written: {error.strerror}") from None
    return tasks


def _write(path: Path, root: Path, part: Path, text: str | None, telling: set[str]) -> None:
    target = part / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        shutil.copyfile(root / path, target)
    else:
        target.write_text(text, encoding="utf-8")
    shutil.copymode(root / path, target)
    content = target.read_bytes()
    for line in telling:
        if line.encode() in content:
            raise RunError(f"{path} would give a solution away: {line!r}")


def _remember(part: Path) -> None:
    """A first commit, so that `git diff` shows what the student has written; nothing where there is no git."""
    commands = (["init", "-q"], ["add", "-A"], [*AUTHOR, "commit", "-q", "-m", "The course as it was handed out"])
    for command in commands:
        try:
            subprocess.run(["git", *command], cwd=part, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return


def main() -> None:
    """Writes the copy that the command line asks for."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(__doc__)
            return
        raise UsageError("name one folder that is not there yet: python -m course.student DEST")
    tasks = write_copy(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {len(tasks)} places to write, {sum(task.points for task in tasks.values())} points")


if __name__ == "__main__":
    run_program(main)
