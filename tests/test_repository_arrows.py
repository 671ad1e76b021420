"""No step imports a later one, and solutions are marked so that they can be taken out; with tests of these tests."""

import textwrap

import pytest

from tests.ranks import ROOT
from tests.source import imports, solutions, step_files, wrong_arrows


def write(root, name: str, text: str):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def test_arrows_point_back():
    assert len(step_files(ROOT)) > 20
    assert not wrong_arrows(ROOT)


@pytest.mark.parametrize(
    "line",
    [
        "import step2_c",
        "import os, step2_c.d as d",
        "from step2_c import d",
        "from step2_c.d import e",
        "from .. import step2_c",
        "from ..step2_c.d import e",
        "def f():\n    import step2_c",
        "importlib.import_module('step2_c.d')",
        "import tests.ranks",
        "from course import grade",
    ],
)
def test_a_wrong_arrow_is_found(tmp_path, line):
    write(tmp_path, "step1_b/ok.py", "import os, step0_a.x\nfrom step1_b import y\nfrom . import z\n")
    assert not wrong_arrows(tmp_path)
    write(tmp_path, "step1_b/wrong.py", line)
    (found,) = wrong_arrows(tmp_path)
    assert found.startswith("step1_b/wrong.py:")


def test_relative_imports_are_resolved(tmp_path):
    path = write(tmp_path, "step1_b/part/x.py", "from . import a\nfrom .m import b\nfrom ..n import c\n")
    assert [module for _, module in imports(path, tmp_path)] == ["step1_b.part", "step1_b.part.m", "step1_b.n"]


def test_solutions_are_well_marked():
    places, wrong = solutions(ROOT)
    assert places
    assert not wrong


GOOD = '''\
class C:
    def f(self, x):
        """Doc."""
        # BEGIN SOLUTION step1.f
        if x:
            return 1
        return 2
        # END SOLUTION

    def g(self):
        """Doc."""
        return 3
'''


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("# END SOLUTION", "pass", "has no"),
        ("# BEGIN SOLUTION step1.f", "pass", "no such line"),
        ("# BEGIN SOLUTION step1.f", "# begin solution step1.f", "is not '# BEGIN"),
        ("step1.f", "step1.F-1", "is not '# BEGIN"),
        ("step1.f", "", "is not '# BEGIN"),
        ("# END SOLUTION", "# END SOLUTION step1.f", "has no"),
        ("step1.f", "step2.f", "step's folder"),
        ('        """Doc."""\n        # BEGIN', "        # BEGIN", "the end of one"),
        ("        # END SOLUTION\n", "        # END SOLUTION\n        return 4\n", "the end of one"),
        ("if x:\n", "if x:\n            # END SOLUTION\n", "no such line"),
        ("        # END SOLUTION", "    # END SOLUTION", "the end of one"),
        ("        return 2\n        # END SOLUTION\n", "        # END SOLUTION\n        return 2\n", "the end of one"),
    ],
)
def test_a_wrong_marker_is_found(tmp_path, old, new, word):
    write(tmp_path, "step1_b/x.py", GOOD)
    assert solutions(tmp_path) == ({"step1.f": "step1_b/x.py:4"}, [])
    assert old in GOOD
    write(tmp_path, "step1_b/x.py", GOOD.replace(old, new))
    assert any(word in text for text in solutions(tmp_path)[1]), solutions(tmp_path)[1]


def test_lines_given_to_the_student_may_come_before(tmp_path):
    write(tmp_path, "step1_b/x.py", GOOD.replace("        # BEGIN", "        check(x)\n        # BEGIN"))
    assert not solutions(tmp_path)[1]


def test_a_name_used_twice_is_found(tmp_path):
    write(tmp_path, "step1_b/x.py", GOOD)
    write(tmp_path, "step1_b/y.py", GOOD)
    assert "is also at" in solutions(tmp_path)[1][0]


def test_a_marker_around_two_functions_is_found(tmp_path):
    end = "        # END SOLUTION\n"
    write(tmp_path, "step1_b/x.py", GOOD.replace(end, "") + end)
    assert "the end of one" in solutions(tmp_path)[1][0]
