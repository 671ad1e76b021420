"""Training under torchrun whose processes are killed at chosen moments: starts it, watches it, kills, and cleans up."""

import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from step0_monolith.checkpoints import Checkpoint, CheckpointDirectory
from step0_monolith.config import Config
from step0_monolith.options import flag_of
from step0_monolith.payload import PayloadError
from step0_monolith.result import Result, read_result
from tests.ranks import ROOT, end_job, job_environment, processes_of

# Seconds that a machine with other work may take to start the ranks, or to end them.
START = 60
END = 10
POLL = 0.005
SIZES = ("num_layers", "width", "batch_size", "num_microbatches", "num_iterations", "optimizer", "dtype",
         "max_grad_norm", "accumulate", "lr_schedule", "warmup_iterations", "seed")  # fmt: skip


def flags_of(config: Config) -> list[str]:
    """The command line of a config."""
    return [text for name in SIZES if (value := getattr(config, name)) is not None for text in (flag_of(name), value)]


@dataclass(frozen=True)
class Kill:
    """One kill -9 of some ranks, or of the launcher alone (no ranks).

    moment: "starting" (from when the ranks' processes are there), "training" (from when they have started to train) or
    "saving" (from when the next unfinished checkpoint is there). delay: seconds after that. gap: seconds between ranks.
    """

    ranks: tuple[int, ...]
    moment: str
    delay: float = 0.0
    gap: float = 0.0


def drawn(seed: int, num_ranks: int, sizes: Sequence[int]) -> list[Kill]:
    """A kill for each of `sizes`, which says how many ranks it hits (0: the launcher), in an order drawn too."""
    draw = random.Random(f"{seed} {num_ranks}")
    moments = (["saving", "training", "starting"] * len(sizes))[: len(sizes)]
    turn: list[int] = []  # so that every rank has its turn
    kills = []
    for size, moment in zip(draw.sample(sizes, len(sizes)), draw.sample(moments, len(moments)), strict=True):
        victims = []
        while len(victims) < size:
            turn = turn or draw.sample(range(num_ranks), num_ranks)
            victims.append(next(rank for rank in [*turn, *range(num_ranks)] if rank not in victims))
            turn = [rank for rank in turn if rank != victims[-1]]
        longest = {"starting": 4.0, "training": 0.8, "saving": 0.6}[moment]
        # torchrun ends the others at once, and ranks that have not met yet do not stay for a moment.
        gap = 0.0 if moment == "starting" else draw.choice([0.0, draw.uniform(0, 0.3)])
        kills.append(Kill(tuple(victims), moment, draw.uniform(0, longest), gap))
    return kills


class TrainingJob:
    """A training under torchrun with checkpoints and --resume. Used as `with`: no process of it is left behind."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        num_ranks: int,
        *arguments: object,
        module: str = "step6_schedules",
        restarts: int = 0,
        every: int = 5,
    ) -> None:
        self.checkpoints, self.result_file = folder / "checkpoints", folder / "result.json"
        self.num_ranks, self.killed = num_ranks, 0
        self._job, self._environment = job_environment()
        self._log = folder / "log.txt"
        self._command = [
            "torchrun", "--standalone", "--max-restarts", restarts, "--nproc-per-node", num_ranks, "-m", module,
            *flags_of(config), "--checkpoint-dir", self.checkpoints, "--checkpoint-every", every, "--resume",
            "--result", self.result_file, *arguments,
        ]  # fmt: skip
        self._launcher: psutil.Popen | None = None
        self._attempt = -1  # as torchrun counts them: 0 for the first start of the ranks
        self._begun = 0  # where in the log this attempt starts
        self._parts: set[str] = set()

    def __enter__(self) -> "TrainingJob":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        end_job(self._job)
        with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
            self._launcher.wait(END)

    def start(self) -> None:
        """Starts torchrun, again after it has ended."""
        with self._log.open("a") as log:
            self._launcher = psutil.Popen(
                list(map(str, self._command)), cwd=ROOT, env=self._environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._attempt = -1

    @property
    def log(self) -> str:
        """What launcher and ranks have written so far, of all attempts."""
        return self._log.read_text()

    def ranks(self) -> dict[int, psutil.Process]:
        """The living ranks of the newest attempt."""
        attempts: dict[int, dict[int, psutil.Process]] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._launcher.children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
                    variables = process.environ()
                    if process.status() != psutil.STATUS_ZOMBIE:
                        attempt = int(variables["TORCHELASTIC_RESTART_COUNT"])
                        attempts.setdefault(attempt, {})[int(variables["RANK"])] = process
        return attempts[max(attempts)] if attempts and max(attempts) >= self._attempt else {}

    def wait_until(self, condition: Callable[[], object], what: str, limit: float = START) -> None:
        """Waits for a condition; fails with the log when the time is up, or the launcher has ended before."""
        deadline = time.monotonic() + limit
        while not condition():
            ended = self._launcher.poll() is not None
            if (ended and not condition()) or time.monotonic() > deadline:
                why = f"torchrun ended with {self._launcher.poll()}" if ended else f"{limit} s are over"
                raise AssertionError(f"waiting for {what}: {why}\n{self.log}")
            time.sleep(POLL)

    def next_attempt(self) -> None:
        """Waits until all ranks of the next attempt are there."""
        before = self._attempt

        def there() -> bool:
            ranks = self.ranks()
            return len(ranks) == self.num_ranks and attempt_of(ranks[0]) > before

        self.wait_until(there, f"the attempt after number {before}")
        self._attempt = attempt_of(self.ranks()[0])
        self._begun = len(self.log)
        self._parts = self._unfinished()

    def await_moment(self, moment: str) -> None:
        """Waits for a kill's moment (see `Kill`) in this attempt."""
        if moment != "starting":
            # The first line that a rank writes, once all of them have met.
            self.wait_until(lambda: "iteration " in self.log[self._begun :], "the start of the training")
        if moment == "saving":
            self.wait_until(lambda: self._unfinished() - self._parts, "a checkpoint under way")

    def await_line(self, text: str) -> None:
        """Waits until this attempt has written `text`."""
        self.wait_until(lambda: text in self.log[self._begun :], f"the line {text!r}")

    def kill(self, *ranks: int, gap: float = 0.0) -> None:
        """kill -9, counted where the rank was still alive."""
        found = self.ranks()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                if found[rank].status() != psutil.STATUS_ZOMBIE:
                    found[rank].kill()
                    self.killed += 1
            time.sleep(gap)

    def kill_launcher(self, limit: float = END) -> None:
        """kill -9 of torchrun; fails unless its ranks end within `limit` seconds."""
        self._launcher.kill()
        self._launcher.wait(END)
        self.killed += 1
        self.await_end_of_processes(limit)

    def await_end_of_processes(self, limit: float = END) -> None:
        """Fails unless all processes of the job end in time."""
        deadline = time.monotonic() + limit
        while left := processes_of(self._job):
            assert time.monotonic() < deadline, f"after {limit} s still there: {left}\n{self.log}"
            time.sleep(0.05)

    def carry_out(self, kill: Kill) -> None:
        """Waits for the next attempt and for the moment, kills, and looks at what is on the disk then."""
        self.next_attempt()
        self.await_moment(kill.moment)
        time.sleep(kill.delay)
        if kill.ranks:
            self.kill(*kill.ranks, gap=kill.gap)
        else:
            # Ranks that still import torch look for their launcher afterwards.
            self.kill_launcher(START if kill.moment == "starting" else END)
        newest(self.checkpoints)
        if not kill.ranks:
            self.start()

    def signal(self, number: int, rank: int | None = None) -> None:
        """Sends a signal to a rank, or to the launcher."""
        (self._launcher if rank is None else self.ranks()[rank]).send_signal(number)

    def end(self, limit: float = START) -> int:
        """Waits for the end and returns torchrun's status; fails when a process is left, or the time is up."""
        try:
            status = self._launcher.wait(limit)
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            raise AssertionError(f"torchrun did not end within {limit} s\n{self.log}") from None
        self.await_end_of_processes(5)
        return status

    def result(self) -> Result:
        """What the run wrote at its end."""
        return read_result(self.result_file)

    def _unfinished(self) -> set[str]:
        return {path.name for path in self.checkpoints.glob(".part-*") if not path.name.endswith("-old")}


def attempt_of(process: psutil.Process) -> int:
    return int(process.environ()["TORCHELASTIC_RESTART_COUNT"])


def newest(folder: Path) -> Checkpoint | None:
    """The checkpoint that `latest` names, every file of it read and checked, while ranks may be writing others."""
    for _ in range(100):
        try:
            name = (folder / "latest").read_text().strip()
        except FileNotFoundError:
            return None
        try:
            checkpoint = CheckpointDirectory(folder).at(int(name.removeprefix("iteration-")))
            for file in checkpoint.manifest["files"]:
                checkpoint.payload(file)
        except PayloadError:
            # Fine only if it was replaced meanwhile.
            if (folder / "latest").read_text().strip() == name:
                raise
        else:
            return checkpoint
    raise AssertionError("latest never stays the same")
