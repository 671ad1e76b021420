"""Hints, one rung after the other, and tasks put back to what was handed out."""

import subprocess
import sys

import pytest

from course.hint import MEMORY, next_hint, task_named
from course.places import all_places, place_for, places_of
from course.student import write_copy
from course.tasks import read_tasks
from step0_monolith.options import RunError, UsageError
from tests.ranks import python

TASKS = read_tasks()


@pytest.fixture
def copy(tmp_path):
    write_copy(tmp_path / "copy")
    return tmp_path / "copy"


def run(copy, module, *arguments, answer=""):
    """A tool of the copy, with something typed."""
    command = [sys.executable, "-m", f"course.{module}", *arguments]
    return subprocess.run(command, cwd=copy, input=answer, capture_output=True, text=True, timeout=60)


def test_each_call_gives_the_next_rung(copy):
    task = TASKS["step1.evenly"]
    first, second, third, after = (next_hint(task, copy) for _ in range(4))
    lesson = "Lesson: step1_partition/README.md, 'Read it, in this order'"
    assert first == f"step1.evenly, hint 1 (2 more): {task.hints[0]}\n{lesson}"
    assert second.startswith(f"step1.evenly, hint 2 (one more): {task.hints[1]}")
    assert third.startswith(f"step1.evenly, hint 3 (the last one): {task.hints[2]}")
    assert after.startswith("step1.evenly: these were all hints")
    assert all(hint in after for hint in task.hints)
    assert next_hint(TASKS["step6.zb_h1"], copy).startswith("step6.zb_h1, hint 1")
    assert "step6_schedules/beyond_1f1b.md, 'Why the backward is split'" in next_hint(TASKS["step6.zb_h1"], copy)
    (copy / MEMORY).write_text("damaged")
    assert next_hint(task, copy).startswith("step1.evenly, hint 1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step1.even", "TASK 'step1.even' is no task; choose one of step1.evenly, step1.stage_forward, "),
        ("forward", "TASK 'forward' is no task|step5.forward"),
        ("", "TASK '' is no task; choose one of step0.forward_backward, step1.evenly"),
    ],
)  # fmt: skip
def test_a_task_is_named_in_full_or_without_its_step(name, message):
    assert task_named("step1.evenly", TASKS) is task_named("evenly", TASKS) is TASKS["step1.evenly"]
    if name == "forward":
        assert task_named(name, TASKS).name == "step5.forward"
        return
    with pytest.raises(UsageError, match=message):
        task_named(name, TASKS)


def test_a_task_is_put_back_when_the_question_is_answered_with_yes(copy):
    file = copy / "step1_partition" / "partition.py"
    handed_out = file.read_text()
    (place,) = places_of(file)
    assert (place.name, place.is_written) == ("step1.evenly", False)
    assert "is as it was handed out" in run(copy, "reset", "evenly").stdout
    mine = handed_out.replace('raise NotImplementedError("step1.evenly is not written yet', 'return ("mine')
    file.write_text(mine)
    assert all_places(copy)["step1.evenly"].is_written
    refused = run(copy, "reset", "step1.evenly", answer="n\n")
    assert 'return ("mine' in refused.stdout
    assert refused.stdout.endswith("nothing was changed\n")
    assert run(copy, "reset", "step1.evenly").stdout.endswith("nothing was changed\n")  # nobody there to answer
    assert file.read_text() == mine
    done = run(copy, "reset", "step1.evenly", answer="y\n")
    assert done.stdout.endswith("is kept as step1_partition/partition.py.before-reset-1\n"), done.stderr
    assert file.read_text() == handed_out
    assert (copy / "step1_partition" / "partition.py.before-reset-1").read_text() == mine
    file.write_text(mine)
    assert run(copy, "reset", "step1.evenly", answer="y\n").stdout.endswith("before-reset-2\n")


def test_every_place_can_be_found_and_put_back(copy):
    places = all_places(copy)
    assert set(places) == set(TASKS)
    for name, place in places.items():
        folder = place.path.relative_to(copy).parts[0]
        lines = place.path.read_text().splitlines()[place.first - 1 : place.last]
        assert [line[place.indent :] for line in lines] == place_for(TASKS[name], folder)


def test_a_lost_mark_is_named_and_a_place_that_is_gone(copy):
    file = copy / "step4_sharded" / "shard.py"
    text = file.read_text()
    file.write_text(text.replace("    # END YOUR CODE\n", ""))
    with pytest.raises(RunError, match=r"shard.py:26: step4.shard has lost its line '# END YOUR CODE'; put it back"):
        all_places(copy)
    file.write_text("")
    ran = run(copy, "reset", "step4.shard")
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: step4.shard has no place here: ")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("module", ["course.hint", "course.reset", "course.student"])
def test_without_a_name_one_line_says_what_to_type(module):
    ran = python(module)
    assert (ran.status, ran.stderr.count("\n")) == (2, 1)
    assert f"python -m {module} " in ran.stderr
