"""The Makefile: what a mistake answers, and a set-up that is done once and done again when it failed half-way.

No test installs anything: PYTHON is a script that plays an interpreter and writes down how it was called.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ranks import ROOT

PLAYED = """\
#!/bin/sh
# Plays a Python {version}; `-m venv` makes one that plays it too, and pip fails while there is a file pip-fails.
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS" "$@" >> "{calls}"
case "$*" in
    *'sys.version_info[:2]'*) echo "{version}";;
    *ensurepip*) exit {no_venv};;
    *'-m venv'*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/torchrun;;
    *'-m pip install'*) test ! -e pip-fails;;
esac
"""


def play(path: Path, calls: Path, version: str = "3.11", no_venv: int = 0) -> Path:
    path.write_text(PLAYED.format(version=version, calls=calls, no_venv=no_venv))
    path.chmod(0o755)
    return path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs make as typed in a terminal, also when make runs these tests."""
    ours = {"STEP", "ARGS", "REQUIRE", "PYTHON", "PIP_ARGS", "OMP_NUM_THREADS"}
    environment = {
        n: value for n, value in os.environ.items() if n not in ours and not n.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=False
    )


class Checkout:
    """A fresh clone's folder, with a space in its path, and an interpreter that only writes down what it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "dir with space"
        self.folder.mkdir()
        for name in ("Makefile", "requirements.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder)
        self.log = folder / "calls of python"
        self.python = play(folder / "python played", self.log)

    def make(self, *arguments: str) -> subprocess.CompletedProcess:
        return make(self.folder, f"PYTHON={self.python}", *arguments)

    def calls(self, word: str) -> list[str]:
        """The calls since the last question that hold a word."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if word in line]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def one_line(ran: subprocess.CompletedProcess) -> str:
    """What make said of a mistake: status 2, one line, nothing done."""
    assert ran.returncode == 2
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    return line


def test_help_is_the_default_and_lists_every_target():
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"help", "setup", "train", "check", "check-all", "lint", *(f"step{n}" for n in range(7))} <= targets
    ran = make(ROOT)
    assert ran.returncode == 0
    assert set(re.findall(r"^make ([a-z0-9-]+) +\S", ran.stdout, re.MULTILINE)) == targets
    assert make(ROOT, "help").stdout == ran.stdout


@pytest.mark.parametrize("step", ["9", "x", "1 2", "-1"])
def test_wrong_step_is_one_line(checkout, step):
    line = one_line(checkout.make("check", f"STEP={step}"))
    assert f"STEP={step} is not a step; choose one of 0 1 2 3 4 5 6" in line
    assert not checkout.log.exists()


@pytest.mark.parametrize("version", ["3.8", "2.7", "3.9"])
def test_old_python_is_one_line(checkout, version):
    play(checkout.python, checkout.log, version)
    assert f"Python 3.10 or newer is needed: found {version}" in one_line(checkout.make("train"))
    assert not (checkout.folder / ".venv").exists()


def test_python_that_does_not_run_is_one_line(checkout):
    checkout.python.unlink()
    assert "does not run" in one_line(checkout.make("check"))


def test_missing_venv_is_one_line(checkout):
    play(checkout.python, checkout.log, no_venv=1)
    assert "apt install python3-venv" in one_line(checkout.make("setup"))


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.13", "3.14"])
def test_set_up_is_done_once(checkout, version):
    play(checkout.python, checkout.log, version)
    ran = checkout.make("setup")
    assert ran.returncode == 0, ran.stderr
    (pip,) = checkout.calls("pip install")
    assert pip.endswith("-r requirements.txt")
    assert "pip" not in checkout.make("-n", "setup").stdout
    assert checkout.make("setup").returncode == 0
    assert not checkout.calls("")


def test_every_target_sets_up_first(checkout):
    targets = re.findall(r"^([a-z][a-z0-9-]*):.*##", (checkout.folder / "Makefile").read_text(), re.MULTILINE)
    for target in targets:
        assert ("pip install" in checkout.make("-n", target).stdout) == (target != "help"), target


def test_set_up_that_failed_is_done_again_from_the_start(checkout):
    (checkout.folder / "pip-fails").touch()
    assert checkout.make("setup").returncode == 2
    assert len(checkout.calls("-m venv")) == 1
    (checkout.folder / "pip-fails").unlink()
    assert checkout.make("setup").returncode == 0
    assert len(checkout.calls("-m venv")) == 1
    assert checkout.make("setup").returncode == 0
    assert not checkout.calls("")


def test_changed_requirements_are_installed_in_the_same_venv(checkout):
    checkout.make("setup")
    checkout.calls("")
    os.utime(checkout.folder / ".venv/set-up-done", (0, 0))  # older than requirements.txt
    checkout.make("setup")
    assert "pip install" in (calls := "\n".join(checkout.calls("")))
    assert "-m venv" not in calls


def test_a_venv_made_by_hand_is_filled(checkout):
    subprocess.run([checkout.python, "-m", "venv", ".venv"], cwd=checkout.folder, check=True, timeout=10)
    checkout.calls("")
    assert checkout.make("setup").returncode == 0
    assert "-m venv" not in "\n".join(checkout.calls(""))


def test_pip_is_told_pip_args_and_again_when_they_change(checkout):
    assert checkout.make("setup", "PIP_ARGS=--find-links 'a b'").returncode == 0
    assert "--find-links a b -r" in checkout.calls("pip install")[0]
    assert checkout.make("setup", "PIP_ARGS=--find-links 'a b'").returncode == 0
    assert checkout.make("setup").returncode == 0
    assert not checkout.calls("")
    assert checkout.make("setup", "PIP_ARGS=--no-index").returncode == 0
    calls = "\n".join(checkout.calls(""))
    assert "-m venv --clear .venv" in calls
    assert "--no-index -r" in calls


def test_a_folder_that_moved_gets_a_new_venv(checkout):
    checkout.make("setup")
    checkout.calls("")
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("it's another"))
    assert checkout.make("setup").returncode == 0
    assert "-m venv --clear .venv" in "\n".join(checkout.calls(""))
    assert checkout.make("setup").returncode == 0
    assert not checkout.calls("")


@pytest.mark.parametrize(
    ("target", "command"),
    [
        (
            "train",
            "=1 --standalone --nproc-per-node 4 -m step6_schedules.train "
            "--timeline out/timeline.png --result out/result.json",
        ),
        ("step3", "=1 --standalone --nproc-per-node 2 -m step3_pingpong"),
        ("step5", "=1 --standalone --nproc-per-node 4 -m step5_orchestrator"),
        ("step0", "= -m step0_monolith"),
        ("check-all", "= -m pytest --durations=10"),
    ],
)
def test_only_torchrun_is_told_the_number_of_threads(checkout, target, command):
    assert checkout.make(target).returncode == 0
    assert checkout.calls("")[-1] == f"OMP_NUM_THREADS{command}"


def test_a_step_and_requirements_reach_pytest(checkout):
    text = checkout.make("-n", "check", "STEP=3", "ARGS=-x").stdout
    assert re.search(r'-m pytest --durations=10 --step 3 -m "not slow" -x$', text, re.MULTILINE)
    assert "not slow" not in checkout.make("-n", "check-all").stdout
