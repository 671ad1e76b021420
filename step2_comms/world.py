"""The ranks as a group: opened once, with a finite timeout, and closed also after an error."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from step0_monolith.options import RunError, UsageError
from step2_comms.device import WorldOptions, choose_here
from step2_comms.launch import Launch
from step2_comms.watch import Watch

# Ranks come to the start one after another, as the machine loads their programs: this much later than one message may.
START_SECONDS = 5.0


@dataclass
class World:
    """This rank's view of the running group."""

    rank: int
    size: int
    device: torch.device
    backend: str
    timeout: timedelta
    store: dist.Store
    watch: Watch
    at_close: list[Callable[[], None]] = field(default_factory=list)  # called when the block of open_world ends
    _exchanges: Counter[str] = field(default_factory=Counter)

    def new_key(self, name: str) -> str:
        """A key of the job's store for one exchange; all who take part ask for `name` equally often."""
        self._exchanges[name] += 1
        return f"{name}/{self._exchanges[name]}"

    @property
    def is_staged(self) -> bool:
        """Whether messages of CUDA tensors travel through pinned host memory, because the backend is gloo."""
        return self.device.type == "cuda" and self.backend == "gloo"

    def gather(self, value: object) -> list | None:
        """Every rank's value on rank 0, in rank order; None elsewhere. For results, never inside an iteration."""
        values = [None] * self.size if self.rank == 0 else None
        with self.watch.waiting("gather of results"):
            dist.gather_object(value, values, dst=0)
        return values

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Sends a CPU tensor from one rank to all, in place."""
        with self.watch.waiting(f"broadcast from rank {source}", None if source == self.rank else source):
            dist.broadcast(tensor, source)
        return tensor


@contextlib.contextmanager
def open_world(launch: Launch, options: WorldOptions, threads: int = 1) -> Iterator[World]:
    """Opens the process group, and closes it at the end.

    Sets the number of threads of this process and, on CUDA, its current device. At the end of the block waits for all
    messages under way; after an error it waits for nothing. Raises UsageError for a device that is not there and
    RunError when the ranks do not find each other within the timeout; an error inside the block stays the one that is
    seen, and is left in the job's store for the other ranks.
    """
    launcher = os.getppid()
    choice = choose_here(options, launch.local_rank, launch.local_size)
    if choice.note and launch.local_rank == 0:
        print(f"note: {choice.note}", file=sys.stderr, flush=True)
    torch.set_num_threads(threads)
    if choice.device.type == "cuda":
        torch.cuda.set_device(choice.device)
    timeout = timedelta(seconds=options.timeout)
    try:
        store = _meet(launch, options.timeout + START_SECONDS)
        dist.init_process_group(
            # Beside NCCL, gloo carries the few CPU tensors of control.
            "gloo" if choice.backend == "gloo" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timeout,
            device_id=choice.device if choice.backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(_why_not_open(launch, options, error)) from error
    store.set_timeout(timeout)
    watch = Watch(store, launch.rank, launch.size, launcher)
    world = World(launch.rank, launch.size, choice.device, choice.backend, timeout, store, watch)
    try:
        yield world
        for close in world.at_close:
            close()
        watch.finish()
    except BaseException as error:
        # The note before the connections: a peer that sees them close looks for it.
        # Whatever goes wrong in closing, the error under way is the one to show.
        for close in (partial(watch.failed, error), *world.at_close, dist.destroy_process_group, watch.stop):
            with contextlib.suppress(Exception):
                close()
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(launch: Launch, seconds: float) -> dist.Store:
    """The job's store, once all ranks have come to it."""
    limit = timedelta(seconds=seconds)
    store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.size, timeout=limit))
    # A launcher that starts failed ranks again may keep its store: each attempt has keys of its own.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(f"here/{launch.rank}", "")
    store.wait([f"here/{rank}" for rank in range(launch.size)], limit)
    return store


def _why_not_open(launch: Launch, options: WorldOptions, error: Exception) -> str:
    text = str(error).splitlines()[0]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"rank {launch.rank}: the port is taken; add --standalone to torchrun, which picks a free one ({text})"
    if "imed out" in text or "imeout" in text or "clients joined" in text:
        return (
            f"rank {launch.rank}: not all of the {launch.size} ranks came within {options.timeout + START_SECONDS:g} s "
            f"(--timeout and {START_SECONDS:g}); is each one started, with the same MASTER_ADDR and "
            f"MASTER_PORT? ({text})"
        )
    return f"rank {launch.rank}: the process group did not open: {text}"


def check_fits(launch: Launch, num_layers: int) -> None:
    """Raises UsageError when there are more ranks than layers; called before any message."""
    if launch.size > num_layers:
        raise UsageError(
            f"{num_layers} layers cannot be shared by {launch.size} ranks; raise --num-layers or start at most "
            f"{num_layers} ranks"
        )
