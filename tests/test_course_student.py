"""The student's copy: places to write, nothing of a solution, and one line from what is not written yet."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from course.regions import all_regions
from course.student import ROOT, files_of, is_left_out, stripped, write_copy
from course.tasks import read_tasks
from step0_monolith.options import RunError, UsageError
from tests.ranks import python, run_command, torchrun

TASKS = read_tasks()


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student") / "copy"
    assert write_copy(folder) == TASKS
    return folder


def test_each_solution_has_become_a_place_to_write(copy):
    texts = {path: path.read_text() for path in copy.glob("step*/**/*.py")}
    for name, region in all_regions(ROOT, TASKS).items():
        text = texts[copy / region.path.relative_to(ROOT)]
        assert text.count(f"# BEGIN YOUR CODE {name} ({TASKS[name].points} points): {TASKS[name].title}\n") == 1
        assert text.count(f'raise NotImplementedError("{name} is not written yet; see step') == 1
    assert sum(text.count("# END YOUR CODE") for text in texts.values()) == len(TASKS)
    assert not any("SOLUTION" in text for text in texts.values())
    for path, text in texts.items():
        compile(text, str(path), "exec")


def test_nothing_of_a_solution_is_left_anywhere(copy):
    """Looked for line by line, in every file, git's own included: what is long and stands in a solution alone."""
    solutions, elsewhere = set(), ""
    for path in ROOT.glob("step*/**/*.py"):
        text = path.read_text()
        inside = re.findall(r"# BEGIN SOLUTION.*?# END SOLUTION", text, re.DOTALL)
        solutions |= {line.strip() for part in inside for line in part.splitlines()[1:-1] if len(line.strip()) > 30}
        elsewhere += re.sub(r"# BEGIN SOLUTION.*?# END SOLUTION", "", text, flags=re.DOTALL)
    solutions = {line for line in solutions if line not in elsewhere}
    assert len(solutions) > 40
    for path in copy.rglob("*"):
        assert "__pycache__" not in path.parts
        if path.is_file() and ".git" not in path.parts:
            content = path.read_text(errors="replace")
            assert not [line for line in solutions if line in content], path
    log = subprocess.run(["git", "log", "-p", "--all"], cwd=copy, capture_output=True, text=True, check=True).stdout
    assert not [line for line in solutions if line in log]
    assert log.count("\ncommit ") + log.startswith("commit ") == 1


def test_all_else_is_the_same(copy):
    for path in files_of(ROOT):
        if is_left_out(path):
            assert not (copy / path).exists()
        elif path.suffix not in (".py", ".md", ".ipynb"):
            assert (copy / path).read_bytes() == (ROOT / path).read_bytes()
    assert (copy / "course" / "course.toml").exists()
    assert not list(copy.glob("tests/test_course*"))
    for notebook in copy.glob("notebooks/*.ipynb"):
        code = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_a_program_that_is_not_written_yet_says_so_in_one_line(copy):
    ran = python("step0_monolith", cwd=copy, environment={"PYTHONPATH": str(copy)})
    assert (ran.status, ran.stderr) == (
        1,
        "error: step0.forward_backward is not written yet; see step0_monolith/README.md\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", ["step2_comms", "step6_schedules"])
def test_so_do_ranks_and_none_of_them_hangs(copy, module):
    ran = torchrun(2, module, cwd=copy, environment={"PYTHONPATH": str(copy)}, limit=60)
    assert ran.status == 1
    assert re.search(r"^error: step\d\.\w+ is not written yet; see step", ran.stderr, re.M), ran.text
    assert f'File "{copy}' not in ran.stderr


@pytest.mark.slow
def test_a_notebook_of_a_step_that_is_not_written_says_so(copy):
    program = (
        "from notebooks.execute import *\n"
        "notebook = read(FOLDER / '0_monolith.ipynb')\n"
        "try:\n    execute(notebook, 'it')\nexcept CellFailed:\n    pass\n"
        "for cell in notebook.cells:\n    for output in outputs_of(cell):\n        print(output)\n"
    )
    ran = run_command([sys.executable, "-c", program], cwd=copy, environment={"PYTHONPATH": str(copy)}, limit=90)
    assert "step0.forward_backward is not written yet; see step0_monolith/README.md" in ran.stdout
    assert "Traceback" not in ran.stdout


# What is refused


def test_a_folder_with_something_in_it_stays_as_it_is(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="is not empty; name a folder that is not there yet"):
        write_copy(tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]
    with pytest.raises(UsageError, match="is not empty"):
        write_copy(tmp_path / "mine.txt")
    with pytest.raises(UsageError, match="lies inside the course itself"):
        write_copy(ROOT / "out" / "student")


def small_course(folder):
    """The course without git, as from an archive."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv*", "out", ".*_cache", "*.png", "tests"))
    return folder


def test_a_course_from_an_archive_and_an_empty_folder(tmp_path):
    root = small_course(tmp_path / "course")
    (root / "out").mkdir()
    (root / "out" / "big.bin").write_text("x")
    (tmp_path / "dest").mkdir()
    write_copy(tmp_path / "dest", root)
    assert (tmp_path / "dest" / "step0_monolith" / "reference.py").exists()
    assert not (tmp_path / "dest" / "out").exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("README.md", "# Pipeline", "`size, longer = divmod(num_layers, num_stages)`\n# Pipeline",
         "README.md would give a solution away: 'size, longer = divmod"),
        ("step1_partition/partition.py", "    # END SOLUTION\n", "", "partition.py:56: step1.evenly has no '# END"),
        ("step1_partition/partition.py", "def evenly(", "def evenly(:", "partition.py:.* (does not|cannot be)"),
    ],
)  # fmt: skip
def test_a_course_that_cannot_be_handed_out_leaves_nothing_behind(tmp_path, file, old, new, message):
    root = small_course(tmp_path / "course")
    path = root / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new) if "*" not in new else text.replace(old, "def evenly(:"))
    with pytest.raises(
        RunError, match=message.replace("does not compile without its sol", "(does not compile|cannot be)")
    ):
        write_copy(tmp_path / "dest", root)
    assert os.listdir(tmp_path) == ["course"]


def test_folded_answers_go(tmp_path):
    root = small_course(tmp_path / "course")
    page = root / "step1_partition" / "README.md"
    page.write_text(page.read_text() + "\n<details><summary>answer</summary>\n\n42, of course\n</details>\nafter\n")
    write_copy(tmp_path / "dest", root)
    text = (tmp_path / "dest" / "step1_partition" / "README.md").read_text()
    assert "42, of course" not in text
    assert text.endswith("\nafter\n")


def test_a_notebook_loses_its_outputs_and_nothing_else():
    text = (ROOT / "notebooks" / "0_monolith.ipynb").read_text()
    before, after = json.loads(text), json.loads(stripped(text))
    assert [cell["source"] for cell in before["cells"]] == [cell["source"] for cell in after["cells"]]
    assert '"image/png"' in text
    assert '"image/png"' not in stripped(text)
