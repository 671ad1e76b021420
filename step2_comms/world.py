"""The ranks as a group: opened once, with a finite timeout, and closed also after an error."""

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from step0_monolith.options import RunError
from step2_comms.device import WorldOptions, choose_here
from step2_comms.launch import Launch
from step2_comms.meet import check_master, meet, why_not
from step2_comms.watch import Watch


@dataclass
class World:
    """This rank's view of the running group, or of a part of it (`part`), where ranks are counted from 0 again."""

    rank: int
    size: int
    device: torch.device
    backend: str
    timeout: timedelta
    store: dist.Store
    watch: Watch
    at_close: list[Callable[[], None]] = field(default_factory=list)  # called when the block of open_world ends
    _exchanges: Counter[str] = field(default_factory=Counter)
    _whole: "World | None" = None
    _parts: tuple[tuple[int, ...], ...] = ()
    _prefix: str = ""  # of the part's keys
    group: dist.ProcessGroup | None = None  # of the part; None: of all ranks

    @property
    def whole(self) -> "World":
        """The world of all ranks."""
        return self._whole or self

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """All parts that the ranks are divided into, each with the ranks of the whole; this world is one of them."""
        return self._parts or (tuple(range(self.size)),)

    @property
    def ranks(self) -> tuple[int, ...]:
        """For each rank of this world its rank in the whole."""
        return next(part for part in self.parts if self.whole.rank in part)

    def part(self, parts: Sequence[Sequence[int]], group: dist.ProcessGroup) -> "World":
        """The part that this rank is in, as a world of its own; `group` is its process group.

        parts: ranks of this world, each in one part. Called on every rank with the same parts.
        """
        parts = tuple(map(tuple, parts))
        own = next(part for part in parts if self.rank in part)
        return replace(
            self,
            rank=own.index(self.rank),
            size=len(own),
            _exchanges=Counter(),
            _whole=self,
            _parts=parts,
            # Numbered: a key that another part has used before would still have its old value in the store.
            _prefix=f"{self.new_key('part')} of rank {own[0]}/",
            group=group,
        )

    def new_key(self, name: str) -> str:
        """A key of the job's store for one exchange; all who take part ask for `name` equally often."""
        self._exchanges[name] += 1
        return f"{self._prefix}{name}/{self._exchanges[name]}"

    def fetch(self, key: str, call: str, peer: int) -> bytes:
        """The value that rank `peer` puts into the job's store as `key`; `call` says what this rank waits in.

        Raises RunError that names the root when the timeout passes or `peer` ends before: `store.get` would not notice.
        """
        peer = self.ranks[peer]
        deadline, pause = time.monotonic() + self.timeout.total_seconds(), 0.001
        with self.watch.waiting(call, peer):
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    raise RuntimeError("timed out")
                if pause > 0.05 and self.watch.has_ended(peer):
                    raise RuntimeError(f"connection to rank {peer} lost")
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
            return self.store.get(key)

    @property
    def is_staged(self) -> bool:
        """Whether messages of CUDA tensors travel through pinned host memory, because the backend is gloo."""
        return self.device.type == "cuda" and self.backend == "gloo"

    def gather(self, value: object) -> list | None:
        """Every rank's value on rank 0, in rank order; None elsewhere. For results, never inside an iteration."""
        values = [None] * self.size if self.rank == 0 else None
        with self.watch.waiting("gather of results"):
            dist.gather_object(value, values, dst=self.ranks[0], group=self.group)
        return values

    def gather_everywhere(self, value: object) -> list:
        """Every rank's value on every rank, in rank order. Never inside an iteration."""
        values = [None] * self.size
        with self.watch.waiting("exchange among all ranks"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' CPU tensors, on every rank, in place."""
        with self.watch.waiting("sum over all ranks"):
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Sends a CPU tensor from one rank to all, in place."""
        origin = self.ranks[source]
        with self.watch.waiting(f"broadcast from rank {origin}", None if source == self.rank else origin):
            dist.broadcast(tensor, origin, group=self.group)
        return tensor


@contextlib.contextmanager
def open_world(launch: Launch, options: WorldOptions, threads: int = 1) -> Iterator[World]:
    """Opens the process group, and closes it at the end.

    Sets the number of threads of this process and, on CUDA, its current device. At the end of the block waits for all
    messages under way; after an error it waits for nothing. Raises UsageError for a device or a host that is not
    there, and RunError when the ranks do not find each other in time; an error inside the block stays the one that is
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
    check_master()
    try:
        store = meet(launch, options.timeout)
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
        raise RunError(why_not(launch, options.timeout, error)) from error
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
