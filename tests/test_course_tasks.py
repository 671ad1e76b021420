"""The tasks of the course and the marked places in the source fit together; with tests of these tests."""

import textwrap

import pytest

from course.regions import RegionError, all_regions, regions_of, replaced
from course.tasks import ALL_POINTS, all_needs, read_tasks
from step0_monolith.options import RunError
from tests.ranks import ROOT

TASKS = read_tasks()


def test_every_task_has_its_place_and_every_place_its_task():
    found = all_regions(ROOT, TASKS)
    assert set(found) == set(TASKS)
    for name, region in found.items():
        assert region.path.relative_to(ROOT).parts[0].startswith(name.split(".")[0] + "_")


def test_points_steps_and_needs():
    assert sum(task.points for task in TASKS.values()) == ALL_POINTS == 100
    assert {task.step for task in TASKS.values()} == set(range(7))
    for name in TASKS:
        needs = all_needs(TASKS, name)
        assert name not in needs
        assert needs == [each for each in TASKS if each in needs]
        assert all(set(TASKS[need].needs) <= set(needs) for need in needs)
    assert "step1.stage_forward" in all_needs(TASKS, "step6.zb_h1")
    assert all_needs(TASKS, "step0.forward_backward") == []


@pytest.mark.parametrize("name", TASKS)
def test_hints_lead_on_and_give_no_code(name):
    task = TASKS[name]
    assert len(set(task.hints)) == len(task.hints) == 3
    assert task.hints[0].endswith("?")
    region = all_regions(ROOT, TASKS)[name]
    lines = region.path.read_text().splitlines()[region.first : region.last - 1]
    code = [line.strip() for line in lines if len(line.strip()) > 15]
    assert not [line for line in code for hint in task.hints if line in hint]


@pytest.mark.parametrize("name", TASKS)
def test_the_section_to_read_is_there(name):
    (folder,) = ROOT.glob(f"{name.split('.')[0]}_*")
    page, _, heading = TASKS[name].section.rpartition(": ")
    text = (folder / (page or "README.md")).read_text()
    assert f"\n## {heading}\n" in text or f"\n**{heading}.** " in text


# What is refused

GOOD = """\
def f(x):
    # BEGIN SOLUTION step1.f
    return x
    # END SOLUTION


class C:
    def g(self):
        text = "# BEGIN SOLUTION step1.in_a_string"
        # BEGIN SOLUTION step1.g
        a = 1
        return a, text
        # END SOLUTION
"""


def write(folder, text, name="step1_b/m.py"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_regions_are_found_and_replaced(tmp_path):
    path = write(tmp_path, GOOD)
    f, g = regions_of(path, tmp_path)
    assert (f.name, f.first, f.last, f.indent) == ("step1.f", 2, 4, 4)
    assert (g.name, g.first, g.last, g.indent) == ("step1.g", 10, 13, 8)
    text = replaced(GOOD, [f, g], lambda region: [f"raise NotImplementedError({region.name!r})", ""])
    assert text == textwrap.dedent("""\
        def f(x):
            raise NotImplementedError('step1.f')



        class C:
            def g(self):
                text = "# BEGIN SOLUTION step1.in_a_string"
                raise NotImplementedError('step1.g')

        """)
    compile(text, "m.py", "exec")


BAD = [
    ("    return x", "    # BEGIN SOLUTION step1.h", "m.py:3: step1.h begins inside step1.f, which began in line 2"),
    ("        # END SOLUTION\n", "", r"step1_b/m.py:10: step1.g has no '# END SOLUTION'"),
    ("    # BEGIN SOLUTION step1.f\n", "", r"step1_b/m.py:3: '# END SOLUTION' without a region that it could end"),
    ("# BEGIN SOLUTION step1.f", "# BEGIN  SOLUTION step1.f", "m.py:2: '# BEGIN  SOLUTION step1.f' is neither"),
    ("# BEGIN SOLUTION step1.f", "# begin solution step1.f", r"m.py:2: '# begin solution step1.f' is neither"),
    ("def f(x):", "def f(x:", r"m.py: cannot be read as Python: "),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BAD)
def test_marks_that_do_not_fit_are_refused_with_their_line(tmp_path, old, new, message):
    assert GOOD.count(old) == 1
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(RegionError, match=message):
        regions_of(path, tmp_path)


def test_names_must_be_known_and_each_is_there_once(tmp_path):
    write(tmp_path, GOOD)
    assert list(all_regions(tmp_path, ["step1.f", "step1.g"])) == ["step1.f", "step1.g"]
    with pytest.raises(RegionError, match=r"step1_b/m.py:10: step1.g is no task of course.toml"):
        all_regions(tmp_path, ["step1.f"])
    with pytest.raises(RegionError, match=r"course.toml has the task step1.h, and no file has a region of that name"):
        all_regions(tmp_path, ["step1.f", "step1.g", "step1.h"])
    write(tmp_path, GOOD, "step1_b/n.py")
    with pytest.raises(RegionError, match=r"step1_b/n.py:2: step1.f is in step1_b/m.py:2 too"):
        all_regions(tmp_path, ["step1.f", "step1.g"])


TOML = """\
[step0.a]
title = "A"
points = 40
needs = []
section = "x"
hints = ["1?", "2", "3"]

[step1.b]
title = "B"
points = 60
needs = ["step0.a"]
section = "x"
hints = ["1?", "2", "3"]
"""
WRONG = [
    ("points = 60", "points = 61", "the points add up to 101, not 100"),
    ("points = 60", "points = 0", "step1.b has 0 points; a whole number from 1 on is meant"),
    ("points = 60", "points = 60.0", "step1.b has 60.0 points; a whole number"),
    ("points = 60\n", "", "step1.b has no points"),
    ('title = "B"', 'title = "B"\ncolour = "red"', "step1.b has 'colour', which is unknown; known are title, points"),
    ('"step0.a"', '"step1.b"', "step1.b needs step1.b, which is no task before it"),
    ('["1?", "2", "3"]\n\n', '["1?", "2"]\n\n', "step0.a has 2 hints, not 3"),
    ("[step0.a]", "[step2.a]", r"step1.b needs step0.a, which is no task before it"),
    ("[step0.a]", "[step0.a", "cannot be read"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_a_list_of_tasks_that_does_not_add_up_is_refused(tmp_path, old, new, message):
    file = tmp_path / "course.toml"
    file.write_text(TOML)
    assert [task.step for task in read_tasks(file).values()] == [0, 1]
    file.write_text(TOML.replace(old, new, 1))
    with pytest.raises(RunError, match=message):
        read_tasks(file)


def test_the_steps_come_in_their_order(tmp_path):
    file = tmp_path / "course.toml"
    file.write_text(TOML.replace('needs = ["step0.a"]', "needs = []").replace("step0.a", "step2.a"))
    with pytest.raises(RunError, match="the steps are not in their order"):
        read_tasks(file)
