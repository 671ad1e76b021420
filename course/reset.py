"""python -m course.reset TASK: puts a task back to what was handed out; asks first, and keeps a copy of the file."""

import itertools
import shutil
import sys
from pathlib import Path

from course.hint import task_named
from course.places import Place, all_places, place_for
from course.tasks import read_tasks
from step0_monolith.files import write_whole
from step0_monolith.options import RunError, UsageError, run_program

ROOT = Path(__file__).resolve().parents[1]


def reset(place: Place, lines: list[str]) -> Path:
    """Puts other lines in place of what stands there; returns where the file as it was is kept."""
    backup = next(
        path for n in itertools.count(1) if not (path := place.path.with_suffix(f".py.before-reset-{n}")).exists()
    )
    shutil.copy2(place.path, backup)
    old = place.path.read_text(encoding="utf-8").splitlines(keepends=True)
    new = [f"{' ' * place.indent}{line}\n" for line in lines]
    text = "".join([*old[: place.first - 1], *new, *old[place.last :]])
    write_whole(place.path, lambda part: part.write_text(text, encoding="utf-8"))
    return backup


def main() -> None:
    """Resets the task that the command line names, when the question is answered with yes."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(__doc__)
            return
        raise UsageError("name one task: python -m course.reset step2.send_forward")
    task = task_named(sys.argv[1], read_tasks())
    place = all_places(ROOT).get(task.name)
    if place is None:
        raise RunError(
            f"{task.name} has no place here: this is no student's copy, or its marks are gone; `git diff` shows what "
            f"was changed, and `git checkout FILE` takes it back"
        )
    name = place.path.relative_to(ROOT)
    if not place.is_written:
        print(f"{task.name} in {name} is as it was handed out")
        return
    print(f"{name}, lines {place.first} to {place.last}:\n{place.text}")
    print(f"Take this away, and put back what was handed out for {task.name}? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        print("nothing was changed")
        return
    backup = reset(place, place_for(task, name.parts[0]))
    print(f"done; the file as it was is kept as {backup.relative_to(ROOT)}")


if __name__ == "__main__":
    run_program(main)
