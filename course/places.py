"""The places in a student's copy, where solutions stood: written by `course.student`, found again by their marks."""

import re
from pathlib import Path
from typing import NamedTuple

from course.tasks import Task
from step0_monolith.options import NOT_WRITTEN, RunError

BEGIN = re.compile(r"^( *)# BEGIN YOUR CODE (step\d\.[a-z][a-z0-9_]*)\b")
END = "# END YOUR CODE"


class Place(NamedTuple):
    """One place. first, last: the lines of its marks, from 1. text: the lines between them."""

    name: str
    path: Path
    first: int
    last: int
    indent: int
    text: str

    @property
    def is_written(self) -> bool:
        """Whether the student has replaced what was handed out."""
        return f'"{self.name} {NOT_WRITTEN}' not in self.text


def page_of(task: Task, folder: str) -> tuple[str, str]:
    """The page and the heading to read before a task."""
    page, _, heading = task.section.rpartition(": ")
    return f"{folder}/{page or 'README.md'}", heading


def place_for(task: Task, folder: str) -> list[str]:
    """The lines that are handed out; they raise NotImplementedError. folder: of the task's step."""
    page, heading = page_of(task, folder)
    return [
        f"# BEGIN YOUR CODE {task.name} ({task.points} points): {task.title}",
        f"# Lesson: {page}, {heading!r}",
        f'raise NotImplementedError("{task.name} {NOT_WRITTEN}; see {page}")',
        END,
    ]


def places_of(path: Path) -> list[Place]:
    """The places of a file, in its order. Raises RunError for one whose end mark is missing."""
    found: list[Place] = []
    opened: tuple[str, int, int] | None = None
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if match := BEGIN.match(line):
            if opened is not None:
                break
            opened = match[2], number, len(match[1])
        elif line.strip() == END and opened is not None:
            name, first, indent = opened
            found.append(Place(name, path, first, number, indent, "\n".join(lines[first : number - 1])))
            opened = None
    if opened is not None:
        raise RunError(f"{path}:{opened[1]}: {opened[0]} has lost its line '{END}'; put it back below your code")
    return found


def all_places(root: Path) -> dict[str, Place]:
    """The places of all steps by name. Raises RunError as `places_of` does."""
    paths = sorted(root.glob("step[0-9]_*/**/*.py"))
    return {place.name: place for path in paths for place in places_of(path)}
