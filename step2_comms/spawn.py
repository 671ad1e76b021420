"""Starts a program with ranks from another program, and leaves no process of it behind, whatever happens."""

import contextlib
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Sequence

import psutil

MARK = "PIPELINE_COURSE_RUN"
ENDING_SECONDS = 3.0  # from SIGTERM to SIGKILL; a rank needs one to leave


def run_to_its_end(
    command: Sequence[str],
    on_line: Callable[[str], None],
    environment: dict[str, str] | None = None,
    *,
    both: bool = True,
    own_session: bool = False,
) -> int:
    """Runs a command, gives each line that it writes to `on_line` as it comes, and returns its exit status.

    Called in the main thread. On an interrupt, or any other exception, all processes of the command are ended before
    the exception goes on. environment: variables besides this process's own. both: read standard output too; otherwise
    standard error alone, and the output goes where this process's goes. own_session: keep the terminal's Ctrl-C, and
    what a process group is sent, away from the command.
    """
    mark = uuid.uuid4().hex
    # torchrun's store looks up names: a name server that does not answer would cost 5 s.
    variables = {"RES_OPTIONS": "timeout:1 attempts:1", **os.environ, **(environment or {})}
    variables[MARK] = f"{os.environ.get(MARK, '')} {mark}"  # a command may itself start one: all carry the outer mark
    try:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, text=True, errors="replace",
            stdout=subprocess.PIPE if both else None, stderr=subprocess.STDOUT if both else subprocess.PIPE,
            start_new_session=own_session,
        )  # fmt: skip
        stream = process.stdout if both else process.stderr
        reader = threading.Thread(target=_read, args=(stream, on_line), daemon=True)
        reader.start()
        status = process.wait()
    finally:
        end_all(mark)
    reader.join(timeout=ENDING_SECONDS)
    return status


def _read(stream, on_line: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            on_line(line.rstrip("\n"))


def processes_of(mark: str) -> list[psutil.Process]:
    """All that carry the mark in their environment. Ranks have sessions of their own, and outlive their launcher for a
    moment, so that neither a process group nor a list of children would have them all.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and mark in process.environ().get(MARK, ""):
                found.append(process)
    return found


def end_all(mark: str) -> None:
    """Ends all that carry the mark; another Ctrl-C meanwhile does not stop that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        for ask in (psutil.Process.terminate, psutil.Process.kill):
            left = processes_of(mark)
            for process in left:
                with contextlib.suppress(psutil.Error):
                    ask(process)
            psutil.wait_procs(left, timeout=ENDING_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
