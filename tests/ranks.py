"""Real ranks for tests: a pool of processes that stays alive, and whole programs under torchrun.

Starting a rank costs seconds, most of it importing torch. The pool's processes are forked from one that has imported
it already, and are used again by the next test; each job gets a process group of its own. Nothing here may hang: every
job has a limit, and on failure each rank's stack is shown and its process ended.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch.distributed as dist

from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch
from step2_comms.world import World, open_world

ROOT = Path(__file__).resolve().parent.parent
MARK = "PIPELINE_COURSE_JOB"
# torch's store looks up the name of each address that connects: 5 s now and then where no name server answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


@dataclass
class Outcome:
    """What one rank's function returned, or the error that it raised."""

    value: object = None
    error: str = ""
    traceback: str = ""


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not end in time; the message shows each rank's error or stack."""


class _Worker:
    def __init__(self) -> None:
        self.log = tempfile.NamedTemporaryFile(prefix="rank-", suffix=".log", delete=False)  # noqa: SIM115
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, self.log.name), daemon=True)
        self.process.start()
        theirs.close()

    def stack(self) -> str:
        """Where the process stands now, and what it has written."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return Path(self.log.name).read_text()[-3000:]

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.log.close()
        Path(self.log.name).unlink(missing_ok=True)


def _serve(connection, log: str) -> None:
    file = open(log, "w", buffering=1)  # noqa: SIM115
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    while True:
        try:
            function, arguments, environment, options = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ.update(environment)
        outcome = Outcome()
        try:
            with open_world(read_launch("tests"), options) as world:
                outcome.value = function(world, *arguments)
        except BaseException as error:  # also SystemExit: a rank that leaves must not take the pool with it
            outcome.error = f"{type(error).__name__}: {error}"
            outcome.traceback = traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        connection.send_bytes(pickle.dumps(outcome))


class Pool:
    """Ranks that stay alive between tests."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._jobs = 0

    def outcomes(self, num_ranks: int, function: Callable, *arguments, limit: float = 60, timeout: float = 30):
        """Runs `function(world, *arguments)` on each of `num_ranks` ranks and returns an Outcome a rank.

        A rank that died, or had not ended after `limit` seconds, has an error that says so, with its stack.
        """
        while len(self._workers) < num_ranks:
            self._workers.append(_Worker())
        workers = self._workers[:num_ranks]
        self._jobs += 1
        for rank, worker in enumerate(workers):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                # As under torchrun: the store belongs to the launcher, and each start of the ranks is an attempt.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(self._jobs),
            }
            job = (function, arguments, environment, WorldOptions(device="cpu", timeout=timeout))
            worker.connection.send_bytes(pickle.dumps(job))
        deadline = time.monotonic() + limit
        outcomes = [self._outcome(worker, deadline) for worker in workers]
        bad = [worker for worker, outcome in zip(workers, outcomes, strict=True) if outcome.error]
        for worker in bad:
            worker.end()
        self._workers = [worker for worker in self._workers if worker not in bad]
        return outcomes

    def run(self, num_ranks: int, function: Callable, *arguments, limit: float = 60, timeout: float = 30) -> list:
        """As `outcomes`, but returns the values, and raises RanksFailed when any rank has none."""
        outcomes = self.outcomes(num_ranks, function, *arguments, limit=limit, timeout=timeout)
        if any(outcome.error for outcome in outcomes):
            lines = [f"rank {r}: {o.error or 'ok'}\n{o.traceback}" for r, o in enumerate(outcomes)]
            raise RanksFailed("\n" + "\n".join(lines))
        return [outcome.value for outcome in outcomes]

    def _outcome(self, worker: _Worker, deadline: float) -> Outcome:
        try:
            if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                return pickle.loads(worker.connection.recv_bytes())
            return Outcome(error="did not end in time", traceback=worker.stack())
        except (EOFError, ConnectionError):
            worker.process.join(5)
            return Outcome(error=f"died with exit code {worker.process.exitcode}", traceback=worker.stack())

    def close(self) -> None:
        """Ends the ranks."""
        for worker in self._workers:
            worker.end()
        self._workers = []


def end_helpers() -> None:
    """Ends the two processes of multiprocessing that would otherwise live as long as this one."""
    # Private, but there in Python 3.10 to 3.14, and the only way to end them before the interpreter does.
    multiprocessing.forkserver._forkserver._stop()
    multiprocessing.resource_tracker._resource_tracker._stop()


@dataclass
class Ran:
    """What a program did."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    job: str

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


def processes_of(job: str) -> list[psutil.Process]:
    """All living processes that carry the job's mark in their environment, whatever group they are in."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == job:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found


def end_job(job: str) -> None:
    """Ends every process that carries the mark."""
    for process in processes_of(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _stacks(job: str) -> str:
    py_spy = Path(sys.executable).with_name("py-spy")
    texts = []
    for process in processes_of(job):
        run = subprocess.run([py_spy, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=20)
        texts.append(run.stdout or run.stderr)
    return "\n".join(texts)


def job_environment(extra: dict[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """A new mark, and an environment that carries it, without what a launcher around the tests may have set."""
    job = uuid.uuid4().hex
    skip = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in skip}
    path = str(Path(sys.executable).parent) + os.pathsep + environment.get("PATH", "")
    return job, {**environment, "PATH": path, MARK: job, **(extra or {})}


def run_command(
    command: list[str], *, limit: float = 60, cwd: Path = ROOT, environment: dict[str, str] | None = None
) -> Ran:
    """Runs a command to its end; after `limit` seconds shows the stack of every process of it, and ends them all.

    Raises RanksFailed on the limit, and when a process of the command is left over 5 s after its end.
    """
    job, variables = job_environment(environment)
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=cwd, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        stacks = _stacks(job)
        end_job(job)
        process.kill()
        stdout, stderr = process.communicate()
        raise RanksFailed(f"{command} did not end within {limit} s\n{stdout}\n{stderr}\n{stacks}") from None
    ran = Ran(process.returncode, stdout, stderr, time.monotonic() - start, job)
    deadline = time.monotonic() + 5
    while processes_of(job) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left := processes_of(job):
        end_job(job)
        raise RanksFailed(f"{command} left processes behind: {left}\n{stdout}\n{stderr}")
    return ran


def torchrun(num_ranks: int, module: str, *arguments: str, limit: float = 90, **kwargs) -> Ran:
    """Runs a module under torchrun, as a student does."""
    command = ["torchrun", "--standalone", "--nproc-per-node", str(num_ranks), "-m", module, *map(str, arguments)]
    return run_command(command, limit=limit, **kwargs)


def python(module: str, *arguments: str, **kwargs) -> Ran:
    """Runs a module in one process."""
    return run_command([sys.executable, "-m", module, *map(str, arguments)], **kwargs)


__all__ = ["ROOT", "Outcome", "Pool", "Ran", "RanksFailed", "World", "python", "run_command", "torchrun"]
