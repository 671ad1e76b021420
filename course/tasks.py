"""What students write: the tasks of course.toml, checked against each other."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step0_monolith.options import RunError

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same code, before it was part of Python
    import tomli as tomllib

FILE = Path(__file__).parent / "course.toml"
NUM_HINTS = 3
ALL_POINTS = 100
FIELDS = ("title", "points", "needs", "section", "hints")


@dataclass(frozen=True)
class Task:
    """One place to write. needs: tasks that it cannot work without. section: of the step's lesson, to read first.
    hints: from a question to nearly the answer.
    """

    name: str
    title: str
    points: int
    needs: tuple[str, ...]
    section: str
    hints: tuple[str, ...]

    @property
    def step(self) -> int:
        """The step that it belongs to."""
        return int(self.name[len("step") : self.name.index(".")])


def read_tasks(path: Path = FILE) -> dict[str, Task]:
    """All tasks by name, in the order of the file, which is the order to write them in.

    Raises RunError that names the task for a missing or unknown field, points that are not whole or do not add up to
    100, a need that is no task or comes later, and another number of hints than three.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{path.name} cannot be read: {error}") from None
    tasks: dict[str, Task] = {}
    for step, entries in content.items():
        for name, fields in entries.items():
            task = _task(f"{step}.{name}", fields)
            unknown = [need for need in task.needs if need not in tasks]
            if unknown:
                raise RunError(f"course.toml: {task.name} needs {unknown[0]}, which is no task before it")
            tasks[task.name] = task
    if [task.step for task in tasks.values()] != sorted(task.step for task in tasks.values()):
        raise RunError("course.toml: the steps are not in their order")
    total = sum(task.points for task in tasks.values())
    if total != ALL_POINTS:
        raise RunError(f"course.toml: the points add up to {total}, not {ALL_POINTS}")
    return tasks


def _task(name: str, fields: Mapping[str, Any]) -> Task:
    for field in FIELDS:
        if field not in fields:
            raise RunError(f"course.toml: {name} has no {field}")
    for field in fields:
        if field not in FIELDS:
            raise RunError(f"course.toml: {name} has {field!r}, which is unknown; known are {', '.join(FIELDS)}")
    points, hints = fields["points"], fields["hints"]
    if not isinstance(points, int) or points < 1:
        raise RunError(f"course.toml: {name} has {points!r} points; a whole number from 1 on is meant")
    if len(hints) != NUM_HINTS:
        raise RunError(f"course.toml: {name} has {len(hints)} hints, not {NUM_HINTS}")
    return Task(name, fields["title"], points, tuple(fields["needs"]), fields["section"], tuple(hints))


def all_needs(tasks: Mapping[str, Task], name: str) -> list[str]:
    """A task's needs, theirs, and so on, in the order of the file."""
    wanted, open_ = set(), [name]
    while open_:
        new = set(tasks[open_.pop()].needs) - wanted
        wanted |= new
        open_ += new
    return [each for each in tasks if each in wanted]
