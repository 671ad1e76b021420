"""python -m step6_schedules.measure.suite: how long `make check` takes, and which tests take longest."""

import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from step0_monolith.options import RunError, parse, run_program
from step6_schedules.measure.figures import Figure
from step6_schedules.measure.load import Load
from step6_schedules.measure.program import MeasureOptions, save

PROGRAM = "python -m step6_schedules.measure.suite"
ROOT = Path(__file__).resolve().parents[2]
GOAL = 5.0  # minutes
NUM_SLOWEST = 10
DURATION = re.compile(r"([\d.]+)s (call|setup|teardown) +(\S.*)")
TOTAL = re.compile(r"total +(\d+) +(\d+) +(\d+) +([\d.]+)")


class Said(NamedTuple):
    """What a run of the tests printed: the scoreboard's totals, and the slowest parts of tests with their seconds."""

    passed: int
    failed: int
    not_run: int
    slowest: dict[str, float]


def read(lines: Sequence[str]) -> Said:
    """Reads the output of `make check`. Raises RunError when it has no scoreboard."""
    totals = [match for line in lines if (match := TOTAL.match(line))]
    if not totals:
        raise RunError(f"make check printed no scoreboard; its last line: {lines[-1] if lines else 'none'}")
    durations = [match for line in lines if (match := DURATION.fullmatch(line.strip()))]
    slowest = {}
    for seconds, phase, test in sorted((match.groups() for match in durations), key=lambda d: -float(d[0])):
        slowest[test if phase == "call" else f"{test} ({phase})"] = float(seconds)
    passed, failed, not_run = map(int, totals[-1].groups()[:3])
    return Said(passed, failed, not_run, dict(list(slowest.items())[:NUM_SLOWEST]))


def measure() -> Figure:
    """Sets up what is not there yet, then runs `make check` once; shows its lines.

    Raises RunError when a test fails: the time of a broken suite says nothing.
    """
    _make("setup")
    load = Load()
    load.start()
    cpu, start = _seconds_of_children(), time.perf_counter()
    lines, status = _make("check")
    seconds = time.perf_counter() - start
    others = load.stop(_seconds_of_children() - cpu)
    said = read(lines)
    if status != 0:
        raise RunError(f"make check ended with status {status}: {said.failed} failed, {said.passed} passed")
    return Figure(
        "make check",
        f"{said.passed} passed, {said.not_run} not run",
        seconds / 60,
        unit="minutes",
        goal=GOAL,
        others=others,
        beside={f"{test}, s": value for test, value in said.slowest.items()},
    )


def _make(target: str) -> tuple[list[str], int]:
    # What a make or a launcher around this program has set is not meant for this one.
    skip = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "STEP", "ARGS", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in skip}
    lines = []
    with subprocess.Popen(
        ["make", target], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if target != "check" and process.returncode != 0:
        raise RunError(f"make {target} ended with status {process.returncode}")
    return lines, process.returncode


def _seconds_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    """Measures."""
    (options,) = parse(PROGRAM, __doc__, {MeasureOptions: ["json"]})
    save([measure()], options.json)


if __name__ == "__main__":
    run_program(main)
