"""The steps' programs also run when they are started by their file's path, from anywhere."""

import importlib
import sys

import pytest

from tests.ranks import ROOT, run_command
from tests.source import step_files

PROGRAMS = [path for path in step_files(ROOT) if path.name == "__main__.py"]


def test_file_names_hide_no_other_module():
    """A program started by its path finds its own folder first: a file called numbers.py there would break torch."""
    modules = [path.relative_to(ROOT).with_suffix("").parts for path in step_files(ROOT)]
    for parts in modules:
        importlib.import_module(".".join(parts))
    others = {name.split(".")[0] for name in sys.modules} - {"tests", "__main__", *(parts[0] for parts in modules)}
    assert {"torch", "numbers"} <= others
    assert not sorted(".".join(parts) for parts in modules if parts[-1] in others)


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_started_by_its_path(path, tmp_path):
    ran = run_command([sys.executable, str(path), "--help"], cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert ran.status == 0, ran.text
    assert "usage:" in ran.stdout


def test_there_are_programs():
    assert {path.parent.name[:5] for path in PROGRAMS} == {f"step{number}" for number in range(7)}
