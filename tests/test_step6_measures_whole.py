"""Step 6, measuring: messages, preparation, start-up and the suite write whole figures. No time is asserted."""

import json
import os
import sys
import textwrap

import pytest
import torch
from torch import nn, optim

from step0_monolith.options import RunError
from step0_monolith.uncompiled import uncompiled
from step6_schedules.measure import startup, suite
from step6_schedules.measure.bare_start import SAYS
from step6_schedules.measure.preparation import slope
from step6_schedules.measure.startup import BARE, OURS, seconds_until
from step6_schedules.measure.suite import read
from tests.ranks import python, run_command, torchrun

PRINTED = """
============================= slowest 10 durations =============================
12.34s call     tests/test_step5_survives.py::test_killed[1 of 2]
3.10s call     tests/test_step0_monolith.py::test_learns
20.00s setup    tests/test_step5_survives.py::test_killed[1 of 2]
=========================== short test summary info ============================
SKIPPED [2] tests/test_x.py:3: no GPU
================= 580 passed, 2 skipped, 40 deselected in 201.23s ==============

scoreboard  passed  failed  not run  seconds  why not run
step 0          80       0        2     20.5  2 no GPU
repository     500       0        0    120.0
total          580       0        2    140.5  40 slow tests are left for make check-all
"""


def figures_of(path):
    figures = json.loads(path.read_text())
    assert all(figure["value"] > 0 and figure["unit"] for figure in figures)
    return figures


def test_what_the_suite_printed_is_read():
    said = read(PRINTED.splitlines())
    assert said[:3] == (580, 0, 2)
    assert list(said.slowest.items()) == [
        ("tests/test_step5_survives.py::test_killed[1 of 2] (setup)", 20.0),
        ("tests/test_step5_survives.py::test_killed[1 of 2]", 12.34),
        ("tests/test_step0_monolith.py::test_learns", 3.10),
    ]
    many = [f"{second}.50s call     tests/test_x.py::test_{second}" for second in range(12)]
    assert list(read([*many, *PRINTED.splitlines()]).slowest.values())[:3] == [20.0, 12.34, 11.5]
    assert len(read([*many, *PRINTED.splitlines()]).slowest) == 10
    with pytest.raises(RunError, match="no scoreboard; its last line: make: nothing"):
        read(["make: nothing"])


def make_that_prints(folder, text, status):
    """A folder with a `make` that prints a text for `make check`, in front of PATH."""
    make = folder / "make"
    (folder / "text").write_text(text)
    make.write_text(f'#!/bin/sh\n[ "$1" = check ] || exit 0\ncat "{folder}/text"\nexit {status}\n')
    make.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_the_suite_is_run_and_its_slowest_tests_are_listed(tmp_path):
    path = tmp_path / "suite.json"
    environment = {"PATH": make_that_prints(tmp_path, PRINTED, 0)}
    ran = python("step6_schedules.measure.suite", "--json", path, environment=environment)
    assert ran.status == 0, ran.text
    assert ran.stdout.startswith(PRINTED)
    (figure,) = figures_of(path)
    assert (figure["case"], figure["unit"], figure["goal"]) == ("580 passed, 2 not run", "minutes", 5.0)
    assert figure["is_met"]
    assert figure["value"] * 60 <= ran.seconds
    assert figure["beside"]["tests/test_step0_monolith.py::test_learns, s"] == 3.1


def test_a_suite_that_fails_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", make_that_prints(tmp_path, PRINTED.replace(" 580       0 ", " 579       1 "), 2))
    with pytest.raises(RunError, match="make check ended with status 2: 1 failed, 579 passed"):
        suite.measure()


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5, 2.0])
def test_the_slope_is_the_exponent(exponent):
    sizes = [128, 512, 2048, 8192]
    assert slope(sizes, [3e-6 * size**exponent for size in sizes]) == pytest.approx(exponent, abs=1e-9)


@pytest.mark.slow
def test_preparation_measures_tables_growth_and_the_library(tmp_path):
    path = tmp_path / "preparation.json"
    small = ["--num-ranks", 16, "--num-microbatches", 32, "--rounds", 2, "--largest-library"]
    ran = python("step6_schedules.measure.preparation", *small, "--json", path)
    assert ran.status == 0, ran.text
    figures = figures_of(path)
    assert [(f["case"], f["goal"]) for f in figures] == [
        ("interleaved, V=2, P=16, M=32", 15.0),
        ("interleaved, V=2, P=2, M=4 to 256", 1.1),
        ("interleaved, V=2, P=2, M=4 to 256", 1.1),
        ("interleaved, V=2, P=2, M=8", None),
        ("interleaved, V=2, P=2, M=32", None),
        ("interleaved, V=2, P=16, M=32", None),
    ]
    assert figures[0]["beside"]["actions"] == 16 * 2 * 2 * 32
    # Memory does not depend on the machine's load.
    assert 0.7 < figures[2]["value"] < 1.1
    assert all(len(values) == 2 for figure in figures for values in figure["samples"].values())


@pytest.mark.slow
def test_messages_measures_both_sizes(tmp_path):
    path = tmp_path / "messages.json"
    ran = torchrun(
        2, "step6_schedules.measure.messages", "--large-bytes", 2**20, "--rounds", 2, "--device", "cpu", "--json", path
    )
    assert ran.status == 0, ran.text
    latency, bandwidth = figures_of(path)
    assert (latency["case"], latency["goal"], latency["at_most"]) == ("4 B", 1.1, True)
    assert (bandwidth["case"], bandwidth["goal"], bandwidth["at_most"]) == ("1 MiB", 0.95, False)
    assert {name: len(values) for name, values in latency["samples"].items()} == {"ours": 200, "bare": 200}
    assert {name: len(values) for name, values in bandwidth["samples"].items()} == {"ours": 2, "bare": 2}


def a_program(text):
    return [sys.executable, "-c", textwrap.dedent(text)]


def test_a_start_is_measured_to_its_line_and_not_to_its_end():
    slow = "import time; print('first'); print('ready now'); time.sleep(0.5); print('ready again')"
    seconds = seconds_until("ready", a_program(slow))
    until_end = seconds_until("ready again", a_program(slow))
    assert until_end >= 0.5
    assert seconds < until_end


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print('other')", "ended with status 0, and printed last: other"),
        ("import sys; print('ready'); sys.exit(3)", "ended with status 3, and printed last: ready"),
        ("import sys; sys.stderr.write('went wrong')", "ended with status 0, and printed last: went wrong"),
    ],
)
def test_a_start_without_its_line_says_what_came_instead(text, words):
    with pytest.raises(RunError, match=words):
        seconds_until("ready", a_program(text))


def test_a_start_that_hangs_is_ended():
    with pytest.raises(RunError, match="ended with status -15, and printed last: here"):
        seconds_until("ready", a_program("import time; print('here'); time.sleep(60)"), limit=1.0)


def test_all_starts_take_turns():
    starts = {name: (a_program(f"print('{name}')"), name) for name in (OURS, BARE)}
    figure = startup.measure(3, starts)
    assert {name: len(values) for name, values in figure.samples.items()} == {OURS: 3, BARE: 3}
    assert figure.goal == 1.15
    assert set(figure.beside) == {"ours, s", "bare, s"}


@pytest.mark.slow
def test_the_bare_program_says_so():
    ran = torchrun(2, "step6_schedules.measure.bare_start")
    assert ran.status == 0, ran.text
    assert ran.stdout.splitlines() == [SAYS]


@pytest.mark.slow
def test_startup_measures_real_starts(tmp_path):
    path = tmp_path / "startup.json"
    ran = python("step6_schedules.measure.startup", "--rounds", 1, "--json", path)
    assert ran.status == 0, ran.text
    (figure,) = figures_of(path)
    assert all(len(values) == 1 for values in figure["samples"].values())
    assert len(figure["samples"]) == 3


def test_training_imports_nothing_of_torch_compile():
    text = """
        import runpy, sys
        sys.argv[1:] = ["--num-iterations", "1"]
        runpy.run_module("step0_monolith", run_name="__main__", alter_sys=True)
        print("loaded:", [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
    """
    ran = run_command(a_program(text))
    assert ran.status == 0, ran.text
    assert ran.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
def test_an_uncompiled_optimizer_makes_the_same_updates_and_states(kind):
    both = []
    for cls in (kind, uncompiled(kind)):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = cls([{"params": list(layer.parameters())}], lr=0.1, weight_decay=0.01, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
        again = cls(layer.parameters(), lr=0.2)
        again.load_state_dict(optimizer.state_dict())
        both.append((layer, again))
    (layer, plain), (same_layer, same) = both
    assert type(same).__name__ == kind.__name__
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), same_layer.parameters(), strict=True))
    assert str(same.state_dict()) == str(plain.state_dict())
    assert not any(
        value.requires_grad for state in same.state.values() for value in state.values() if value is not None
    )
