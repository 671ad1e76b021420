"""python -m course.hint TASK: one more hint to a task, from a question to nearly the answer."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from course.places import page_of
from course.tasks import Task, read_tasks
from step0_monolith.files import write_whole
from step0_monolith.options import UsageError, run_program

ROOT = Path(__file__).resolve().parents[1]
MEMORY = ".course/hints.json"  # how many hints of each task were given


def task_named(name: str, tasks: Mapping[str, Task], flag: str = "TASK") -> Task:
    """The task of that name, with or without its step. Raises UsageError that names those that are meant perhaps."""
    short = [each for each in tasks if each.split(".")[1] == name]
    if name in tasks or len(short) == 1:
        return tasks[name if name in tasks else short[0]]
    step = [each for each in tasks if each.split(".")[0] == name.split(".")[0]]
    raise UsageError(f"{flag} {name!r} is no task; choose one of {', '.join(step or tasks)}")


def given(root: Path) -> dict[str, int]:
    """How many hints of each task were given. A file that cannot be read counts as none."""
    try:
        found = json.loads((root / MEMORY).read_text(encoding="utf-8"))
        return {str(name): int(count) for name, count in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def next_hint(task: Task, root: Path = ROOT) -> str:
    """The next rung of the ladder, and how many are left; after the last one all of them again."""
    counts = given(root)
    count = min(counts.get(task.name, 0) + 1, len(task.hints))
    was_last = counts.get(task.name, 0) >= len(task.hints)
    counts[task.name] = count
    (root / MEMORY).parent.mkdir(exist_ok=True)
    write_whole(root / MEMORY, lambda part: part.write_text(json.dumps(counts) + "\n", encoding="utf-8"))
    folder = next(root.glob(f"step{task.step}_*")).name
    page, heading = page_of(task, folder)
    if was_last:
        lines = [f"{n}. {hint}" for n, hint in enumerate(task.hints, 1)]
        return "\n".join([f"{task.name}: these were all hints", *lines, f"Read {page}, {heading!r}, once more."])
    left = len(task.hints) - count
    more = "the last one" if left == 0 else f"{left} more" if left > 1 else "one more"
    return f"{task.name}, hint {count} ({more}): {task.hints[count - 1]}\nLesson: {page}, {heading!r}"


def main() -> None:
    """Prints the next hint to the task that the command line names."""
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        if {"-h", "--help"} & set(sys.argv):
            print(__doc__)
            return
        raise UsageError("name one task: python -m course.hint step2.send_forward")
    print(next_hint(task_named(sys.argv[1], read_tasks())))


if __name__ == "__main__":
    run_program(main)
