"""Runs one measuring program to its end: its lines are shown, its figures read, and no process of it is left behind."""

import contextlib
import json
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from step2_comms.launch import torchrun_command
from step2_comms.spawn import run_to_its_end
from step6_schedules.measure.figures import Figure

THREADS = 1  # a rank
# The first is what a launcher of ranks says of them; a traceback under torchrun has the second in front of its lines.
OF_THE_LAUNCHER = "ChildFailedError"
RAISED = re.compile(r"(?:\[rank\d+\]: )?((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt)\b.*)")
NOT_THERE = re.compile(r"\S+: (No module named .*)")


@dataclass
class Run:
    """One program's run. family: of the measurements it belongs to. error: why it has no figures; None: it has."""

    family: str
    command: str
    seconds: float
    figures: list[Figure] = field(default_factory=list)
    error: str | None = None


def figure_of(fields: dict) -> Figure:
    """A figure from what Figure.to_json made of it. Raises KeyError or TypeError for anything else."""
    own = {name: value for name, value in fields.items() if name not in ("is_met", "is_disturbed")}
    return Figure(**{**own, "spread": None if own["spread"] is None else tuple(own["spread"])})


def run(family: str, module: str, num_ranks: int | None, arguments: Sequence[str]) -> Run:
    """Runs a module under torchrun, or in one process where num_ranks is None, and reads the figures that it writes.

    A program that fails is no error here: its run says why. Called in the main thread; on an interrupt, all processes
    of the program are ended before the interrupt goes on.
    """
    start = ["-m", module]
    if num_ranks is not None:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", *start]
    typed = f"python -m {module}" if num_ranks is None else torchrun_command(module, num_ranks)
    command = " ".join([typed, *map(shlex.quote, arguments)])
    print(f"\n$ {command}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        status, lines = _to_its_end([sys.executable, *start, *arguments, "--json", str(file)])
        found = Run(family, command, time.monotonic() - began)
        if status:
            found.error = reason(status, lines)
        elif not file.exists():
            found.error = "it wrote no figures"
        else:
            try:
                found.figures = [figure_of(fields) for fields in json.loads(file.read_text())]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                found.error = f"its figures cannot be read: {type(error).__name__}: {error}"
    if found.error:
        print(f"not measured: {found.error}", file=sys.stderr, flush=True)
    return found


def reason(status: int, lines: Iterable[str]) -> str:
    """Why a program failed, in one line: its own error, else the first exception, else its exit status."""
    lines = list(lines)
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [match[1] for line in lines if (match := RAISED.fullmatch(line)) and OF_THE_LAUNCHER not in line]
    absent = [match[1] for line in lines if (match := NOT_THERE.fullmatch(line))]
    ended = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
    return (*said, *raised, *absent, ended)[0][:300]


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and a closed terminal end this process as Ctrl-C does: what it has started is ended first."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _to_its_end(command: Sequence[str]) -> tuple[int, list[str]]:
    """The exit status, and the lines of standard error, which are shown as they come."""
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    # A session of its own, so that Ctrl-C reaches this process alone, which then ends all others.
    status = run_to_its_end(command, show, {"OMP_NUM_THREADS": str(THREADS)}, both=False, own_session=True)
    return status, lines
