"""python -m step6_schedules.measure.startup: from torchrun to the end of the first iteration, against a bare program.

Starts `torchrun --standalone --nproc-per-node 2 -m step6_schedules` and a program that only imports torch, opens a
group and sums once (bare_start.py), in turn, and reads what they print as they print it.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from step0_monolith.options import RunError, parse, run_program
from step6_schedules.measure.bare_start import SAYS
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.load import Load
from step6_schedules.measure.program import MeasureOptions, save
from step6_schedules.measure.rounds import spread

PROGRAM = "python -m step6_schedules.measure.startup"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
OURS, BARE, BARE_STEP = "ours", "bare", "bare with an optimizer's step"
BARE_MODULE = "step6_schedules.measure.bare_start"
# For each: what runs, and the start of the line that it prints when it is as far as is measured.
STARTS = {
    OURS: ([*TORCHRUN, "step6_schedules", "--num-iterations", "1"], "iteration     1"),
    BARE: ([*TORCHRUN, BARE_MODULE], SAYS),
    BARE_STEP: ([*TORCHRUN, BARE_MODULE, "step"], SAYS),
}
# Unbuffered: what is printed to a pipe would otherwise come when the program ends.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
LIMIT = 60.0  # seconds of one start
GOAL = 1.15


def seconds_until(says: str, command: Sequence[str], limit: float = LIMIT) -> float:
    """Seconds from starting a command until it prints a line that starts with `says`; returns when it has ended.

    Raises RunError, with the last line it printed, when it ends without that line, fails, or takes longer than `limit`.
    """
    start, found, last = time.perf_counter(), None, "nothing"
    with _running(command, limit) as process:
        for line in process.stdout:
            if found is None and line.startswith(says):
                found = time.perf_counter() - start
            last = line.strip() or last
        status = process.wait()
    if found is None or status != 0:
        raise RunError(f"{' '.join(command)} ended with status {status}, and printed last: {last}")
    return found


@contextlib.contextmanager
def _running(command: Sequence[str], limit: float) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    # On SIGTERM torchrun ends its ranks first.
    timer = threading.Timer(limit, process.send_signal, [signal.SIGTERM])
    timer.start()
    try:
        with process.stdout:
            yield process
    finally:
        timer.cancel()
        if process.poll() is None:
            process.terminate()
            process.wait()


def measure(rounds: int, starts: Mapping[str, tuple[Sequence[str], str]] = STARTS) -> Figure:
    """The figure, from so many rounds, in which all take turns. starts: as STARTS; OURS and BARE are among them."""
    found: dict[str, list[float]] = {name: [] for name in starts}
    load, others = Load(), []
    for number in range(rounds + 1):
        for name in list(starts)[:: -1 if number % 2 else 1]:
            command, says = starts[name]
            load.start()
            own = _seconds_of_children()
            seconds = seconds_until(says, command)
            if number:  # the first round warms the file system's cache
                found[name].append(seconds)
                others.append(load.stop(_seconds_of_children() - own))
    return Figure(
        "start-up to the first iteration, ours / bare",
        "2 ranks",
        **of_spread(spread([ours / bare for ours, bare in zip(found[OURS], found[BARE], strict=True)])),
        goal=GOAL,
        others=statistics.median(others),
        beside={f"{name}, s": statistics.median(values) for name, values in found.items()},
        samples=found,
    )


def _seconds_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    """Measures."""
    (options,) = parse(PROGRAM, __doc__, {MeasureOptions: ["rounds", "json"]})
    save([measure(options.rounds)], options.json)


if __name__ == "__main__":
    run_program(main)
