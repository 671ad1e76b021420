"""What every notebook uses: the first cell's look around, programs with ranks, guesses, and pictures."""

import importlib.util
import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {"torch": "torch", "matplotlib": "matplotlib", "sklearn": "scikit-learn", "safetensors": "safetensors",
          "psutil": "psutil", "tqdm": "tqdm"}  # fmt: skip
# What torchrun says itself: lines with a date, and a summary with processes and times, under a line of equal signs.
OF_THE_LAUNCHER = re.compile(r"[WEIF]\d{4} \d\d:\d\d:\d\d|\[W\d|={20,}|-{20,}")
TRACEBACK, CHILD_FAILED = "Traceback (most recent call last):", "ChildFailedError"


class ProgramFailed(RuntimeError):
    """A program that a cell has started ended with an error, or with none where one was expected."""

    def _render_traceback_(self) -> list[str]:
        # IPython's hook: the cell's reader needs the reason, not the way through this file.
        return [f"{type(self).__name__}: {self}"]


def setup() -> None:
    """Says what was found on this machine, and how to install what was not.

    Goes to the repository's root, where programs belong, makes the folder out/ for files, and gives each process one
    thread.
    """
    os.chdir(ROOT)
    Path("out").mkdir(exist_ok=True)
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ProgramFailed(f"not installed: {', '.join(missing)}. Run `%pip install -r requirements.txt`, then again")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    _say_what_is_not_written()
    gpus = torch.cuda.device_count()
    devices = "no GPU: ranks talk over gloo" if gpus == 0 else f"GPUs: {gpus}; as many ranks talk over NCCL"
    print(f"torch {torch.__version__.split('+')[0]}, {os.cpu_count()} CPU cores, {devices}")


def _say_what_is_not_written() -> None:
    """From here on a place that is still to be written ends its cell with one line instead of a traceback."""
    from IPython import get_ipython

    from step0_monolith.options import NOT_WRITTEN

    def show(shell, kind: type, error: BaseException, trace: object, tb_offset: int | None = None) -> None:
        if NOT_WRITTEN in str(error):
            print(error)
        else:
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)

    if get_ipython() is not None:
        get_ipython().set_custom_exc((NotImplementedError,), show)


def torchrun(num_ranks: int, module: str, *arguments: object, fails: bool = False, launcher: bool = False) -> None:
    """Runs a module on so many ranks and shows what they print as it comes.

    arguments: as on a command line, in one text or several.
    fails: the program is meant to fail; its error is shown, and it is ProgramFailed when there was none. launcher: show
    torchrun's own lines too. Raises ProgramFailed otherwise, with the program's own reason. An interrupt of the cell
    ends all ranks.
    """
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m", module]
    _run(f"torchrun --standalone --nproc-per-node {num_ranks} -m {module}", start, arguments, fails, launcher)


def python(module: str, *arguments: object, fails: bool = False) -> None:
    """Runs a module in one process of its own and shows what it prints, as `torchrun` does for several."""
    _run(f"python -m {module}", ["-m", module], arguments, fails, launcher=True)


def guess(what: str, mine: float | None, found: float, within: float = 0.01) -> None:
    """Holds a guess against the number that was found: within a share of it (1 % by default), it is right."""
    said = f"you said {mine:g}" if mine is not None else "no guess yet: write a number into the cell above"
    right = mine is not None and abs(mine - found) <= within * max(abs(found), 1e-12)
    shown = f"{found:,}" if isinstance(found, int) else f"{found:.4g}"
    print(f"{what}: {shown} ({said}{'' if mine is None else ', right' if right else ', not quite'})")


def show(figure) -> None:
    """Shows a matplotlib figure below the cell, the same bytes each time."""
    from IPython.display import Image, display

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    display(Image(buffer.getvalue()))


def show_file(path: str | Path) -> None:
    """Shows a picture that a program has written."""
    from IPython.display import Image, display

    display(Image(filename=str(path)))


def _run(shown: str, start: Sequence[str], arguments: Sequence[object], fails: bool, launcher: bool) -> None:
    from step2_comms.spawn import run_to_its_end

    words = shlex.split(" ".join(map(str, arguments)))
    print("$", " ".join([shown, *words]), flush=True)
    errors: list[str] = []
    lines = _Lines(launcher)

    def show_all(found: Sequence[str]) -> None:
        for line in found:
            print(line.replace(f"{ROOT}/", ""), flush=True)

    def on_line(line: str) -> None:
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: "))
        show_all(lines.take(line))

    status = run_to_its_end([sys.executable, *start, *words], on_line, {"OMP_NUM_THREADS": "1"})
    show_all(lines.rest())
    if status and not fails:
        raise ProgramFailed(f"exit status {status}: {errors[0] if errors else 'see what it printed above'}")
    if fails and not status:
        raise ProgramFailed("it was meant to fail, and did not")


class _Lines:
    """Which lines to show: all but torchrun's own. The last of these are a traceback, which is held back to its end,
    since a rank that fails before its group is open writes one that looks alike.
    """

    def __init__(self, launcher: bool) -> None:
        self._shows_launcher, self._held = launcher, []

    def take(self, line: str) -> list[str]:
        """The lines to show now that this one has come."""
        if self._shows_launcher:
            return [line]
        if OF_THE_LAUNCHER.match(line):
            return []
        if line.startswith(TRACEBACK):
            found, self._held = self._held, [line]
            return found
        if self._held:
            self._held.append(line)
            return []
        return [line]

    def rest(self) -> list[str]:
        """The lines to show at the end."""
        is_the_launchers = any(CHILD_FAILED in line for line in self._held)
        return [] if is_the_launchers else self._held
