"""The scoreboard counts right, and fails the run when it should; each test runs pytest on a few tests of its own."""

import os
import re
import subprocess
import sys

import psutil
import pytest

from tests.ranks import ROOT

CONFTEST = """\
from tests import scoreboard
scoreboard.NEEDS["gpu"] = ("no GPU", lambda: False)
scoreboard.NEEDS["root"] = ("not root", lambda: True)
pytest_plugins = ["tests.scoreboard"]
"""

MIXED = {
    "test_step1_a.py": """\
        import pytest
        def test_good(): pass
        def test_bad(): assert 0
        @pytest.fixture
        def broken(): 1 / 0
        @pytest.fixture
        def leaving():
            yield
            1 / 0
        @pytest.fixture
        def skipping():
            yield
            pytest.skip("too late")
        def test_bad_and_skips(skipping): assert 0
        def test_setup(broken): pass
        def test_teardown(leaving): pass
        """,
    "test_step2_a.py": """\
        import pytest
        @pytest.mark.gpu
        def test_gpu(): assert 0
        @pytest.mark.root
        def test_root(): pass
        @pytest.mark.gpu
        def test_gpu_too(): assert 0
        def test_skips(): pytest.skip("no disk")
        @pytest.mark.slow
        def test_slow(): assert 0
        """,
    "test_step3_a.py": "import nothing_of_this_name",
    "test_lessons.py": """\
        import pytest
        @pytest.mark.parametrize("page", ["step1_a/README.md:3", "step2_b/README.md:3"])
        def test_page(page): pass
        """,
    "test_other.py": "def test_other(): pass",
}


@pytest.fixture
def run(tmp_path):
    """Runs pytest on the given modules and returns it with its scoreboard: name -> (passed, failed, not run, why)."""

    def run_pytest(modules: dict[str, str], *arguments: str, **variables: str):
        for name, text in {**modules, "conftest.py": CONFTEST}.items():
            lines = text.splitlines()
            indent = len(lines[0]) - len(lines[0].lstrip())
            (tmp_path / name).write_text("\n".join(line[indent:] for line in lines))
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\nmarkers =\n  slow: x\n  gpu: x\n  root: x\naddopts = --continue-on-collection-errors\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "REQUIRE": "", **variables}
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        table = ran.stdout[ran.stdout.find("\nscoreboard ") :]
        rows = re.findall(r"^(step \d|lessons|repository|total) +(\d+) +(\d+) +(\d+) +[\d.]+ *(.*)$", table, re.M)
        ran.board = {name: (int(p), int(f), int(n), why) for name, p, f, n, why in rows}
        return ran

    return run_pytest


def test_counts_what_passed_failed_and_was_not_run(run):
    ran = run(MIXED, "-m", "not slow")
    assert ran.returncode == 1
    assert ran.board == {
        "step 0": (0, 0, 0, "has no tests"),
        "step 1": (1, 4, 0, ""),
        "step 2": (1, 0, 3, "2 no GPU, 1 no disk"),
        "step 3": (0, 1, 0, ""),
        "step 4": (0, 0, 0, "has no tests"),
        "step 5": (0, 0, 0, "has no tests"),
        "step 6": (0, 0, 0, "has no tests"),
        "lessons": (2, 0, 0, ""),
        "repository": (1, 0, 0, ""),
        "total": (5, 5, 3, "1 slow test is left for make check-all"),
    }
    assert re.search(r"^=+ .*2 failed.* in .*s =+$", ran.stdout, re.M), "pytest's own closing line"


def test_one_step_and_its_lesson(run):
    ran = run(MIXED, "-m", "not slow", "--step", "2")
    assert ran.returncode == 0
    assert ran.board == {
        "step 2": (1, 0, 3, "2 no GPU, 1 no disk"),
        "lessons": (1, 0, 0, ""),
        "total": (2, 0, 3, "1 slow test is left for make check-all"),
    }


def test_what_is_required_but_cannot_run_fails(run):
    module = {"test_step2_a.py": MIXED["test_step2_a.py"]}
    ran = run(module, "-m", "not slow", "--step", "2", REQUIRE="root,gpu")
    assert ran.returncode == 1
    assert ran.board["step 2"] == (1, 2, 1, "1 no disk")
    assert "not run: no GPU, and REQUIRE asks for gpu" in ran.stdout
    assert run(module, "-m", "not slow", "--step", "2", REQUIRE="root").returncode == 0


def test_unknown_word_in_require(run):
    ran = run(MIXED, REQUIRE="gpu,tpu")
    assert ran.returncode == 4
    assert "tpu is unknown; choose from gpu,root,browser" in ran.stderr
    assert not ran.board


@pytest.mark.parametrize("arguments", [["-k", "test_gpu"], ["-k", "test_nothing_of_this_name"]])
def test_no_test_run_is_a_failure(run, arguments):
    ran = run({"test_step2_a.py": MIXED["test_step2_a.py"]}, *arguments)
    assert ran.returncode != 0
    assert "FAILED: no test was run" in ran.stdout


def test_a_run_that_was_stopped_says_what_is_left(run):
    ran = run({"test_step1_a.py": MIXED["test_step1_a.py"]}, "-x")
    assert ran.board["step 1"] == (1, 1, 3, "3 the run was stopped")


LEAVES = """\
    import subprocess, sys
    def test_leaves():
        code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(77)'])"
        subprocess.run([sys.executable, "-c", code])
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(78)"])
    """


@pytest.mark.slow
def test_processes_left_behind_fail_the_run_and_are_ended(run):
    ran = run({"test_other.py": LEAVES})
    assert ran.returncode == 1
    assert ran.board["total"] == (1, 0, 0, "")
    left = re.findall(r"^FAILED: left behind: process (\d+): .*sleep\((\d+)\)", ran.stdout, re.M)
    assert sorted(seconds for _, seconds in left) == ["77", "78"]
    pids = {int(pid) for pid, _ in left}
    assert not [p for p in psutil.process_iter(["status"]) if p.pid in pids and p.info["status"] != "zombie"]
