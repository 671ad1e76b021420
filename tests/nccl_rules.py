"""NCCL's rules for messages, kept on the CPU: one transport for tests, over gloo, with real ranks and real messages.

Inside `with nccl_rules():` the functions that post a message, `dist.isend` and `dist.irecv`, hand it to a queue of its
communicator (process group), and one thread a queue carries the messages out by gloo. Nothing of the course is
replaced: channels, contracts, executors run as they are. Blocking `dist.send` and `dist.recv`, collectives and the
store stay gloo's, as they do beside NCCL for the few CPU tensors of control.

    with nccl_rules():  # inside a function that the pool's ranks run
        ...
    torchrun --standalone --nproc-per-node 4 -m tests.nccl_rules step6_schedules --num-iterations 3

Its rules, all of which NCCL has:

1. One queue a communicator, sends and receives together, in posting order: an operation starts when all those posted
   before it are done. One that cannot be done yet holds up everything behind it. (torch's NCCL does so for a group
   opened with a device, as step 2 opens it: one communicator and one stream.) Communicators do not hold up each other.
2. A send is done only when its receive has started on the other rank, at any size, 0 elements too; until then it
   holds up its queue.
3. The n-th send of a queue meets the peer's n-th receive. Tags are ignored.
4. What was posted is carried out whether or not anybody calls `wait()`. Waiting twice is harmless.
5. The group's timeout runs from the moment an operation starts, also while nobody waits. After one failure all
   operations of the queue fail.
6. Closing the group breaks off what is under way there, and the peer's operation fails; no thread is left.
7. Refused when posted: a receive from anybody, and a tensor that is not contiguous.

What plain gloo does instead: 1. messages of a pair overtake each other when tags or directions differ; 2. is the same,
but the messages behind it go on; 3. goes by tags; 4. needs one `wait()` for each message, and a second can hang;
5. counts the timeout inside `wait()`; 6. the connection stays until nobody holds a part of it.

Where NCCL itself is more generous, or cannot be had on the CPU: NCCL may copy a small message away so that its send is
done before the receive has started, which a program must not count on; `wait()` there holds up the stream, not the
program, and a program that never looks at a value may run on; there are no batches (`batch_isend_irecv`), whose
operations may start together. Neither this nor NCCL checks sizes: gloo ends the process on a receive that is too small.
"""

import contextlib
import queue
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_GLOO = {name: getattr(dist, name) for name in ("isend", "irecv", "destroy_process_group")}
_BREAK_TAG = 77  # of no message: those of a queue all have tag 0


class Operation:
    """A message that was posted: what `dist.isend` and `dist.irecv` return."""

    def __init__(self, name: str, tensor: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        self._name, self._tensor, self.peer, self._group = name, tensor, peer, group
        self._done = threading.Event()
        self._failure: str | None = None

    def carry_out(self) -> None:
        """Sends or receives by gloo; returns when that is done. Raises RuntimeError as gloo does."""
        _GLOO[self._name](self._tensor, self.peer, group=self._group).wait()

    def finish(self, failure: str | None) -> None:
        """Lets those go on who wait."""
        self._failure = failure
        self._done.set()

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> bool:
        """Waits for the end; raises RuntimeError with gloo's words when the operation failed."""
        self._done.wait()
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True


class Queue:
    """The operations of one communicator on this rank, and the thread that carries them out one after the other."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._posted: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: Operation | None = None
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="nccl_rules")
        self._thread.start()

    def post(self, operation: Operation) -> Operation:
        """Puts an operation behind all that were posted before."""
        self._posted.put(operation)
        return operation

    def _work(self) -> None:
        while (operation := self._posted.get()) is not None:
            with self._lock:
                failure = self._failure
                self._running = operation if failure is None else None
            if failure is None:
                try:
                    operation.carry_out()
                except Exception as error:  # whatever it is belongs to the one who waits for the operation
                    failure = str(error) or type(error).__name__
            with self._lock:
                self._running = None
                self._failure = self._failure or failure
            operation.finish(failure)
            del operation  # its tensor too: nothing is held while the thread waits for the next

    def close(self) -> None:
        """Ends the thread; breaks off the operation under way, so that the peer's fails too, and fails the rest."""
        with self._lock:
            self._failure = self._failure or "the connection was closed on this rank before the operation was done"
        self._posted.put(None)
        while self._thread.is_alive():
            with self._lock:
                running = self._running
            if running is not None:
                # gloo has no call that ends a wait in another thread. But when any wait of a pair times out, it closes
                # the pair, and all waits there end.
                with contextlib.suppress(RuntimeError):
                    receive = _GLOO["irecv"](torch.empty(1), running.peer, group=self._group, tag=_BREAK_TAG)
                    receive.wait(timedelta(milliseconds=1))
            self._thread.join(0.05)


_queues: dict[dist.ProcessGroup, Queue] = {}
_is_installed = False


def _post(name: str, tensor: Tensor, peer: int | None, group: dist.ProcessGroup | None) -> Operation:
    if peer is None:
        raise ValueError("NCCL receives from a rank that is named, not from any")
    if not tensor.is_contiguous():
        raise ValueError("NCCL takes contiguous tensors only")
    communicator = dist.group.WORLD if group is None else group
    dist.get_group_rank(communicator, peer)  # raises ValueError for a group that is closed, or a rank outside it
    if communicator not in _queues:
        _queues[communicator] = Queue(group)
    return _queues[communicator].post(Operation(name, tensor, peer, group))


def _isend(tensor: Tensor, dst: int | None = None, group: dist.ProcessGroup | None = None, tag: int = 0) -> Operation:
    return _post("isend", tensor, dst, group)


def _irecv(tensor: Tensor, src: int | None = None, group: dist.ProcessGroup | None = None, tag: int = 0) -> Operation:
    return _post("irecv", tensor, src, group)


def _destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    is_world = group is None or group == dist.group.WORLD
    for communicator in list(_queues) if is_world else [group]:
        if communicator in _queues:
            _queues.pop(communicator).close()
    _restore()
    _GLOO["destroy_process_group"](group)


def _restore() -> None:
    """gloo's own functions again; closing keeps its rule until the last queue is closed."""
    if not _is_installed:
        dist.isend, dist.irecv = _GLOO["isend"], _GLOO["irecv"]
        if not _queues:
            dist.destroy_process_group = _GLOO["destroy_process_group"]


@contextlib.contextmanager
def nccl_rules() -> Iterator[None]:
    """Messages posted inside keep NCCL's rules, also when they are waited for, or broken off, after the block.

    Raises RuntimeError inside another such block.
    """
    global _is_installed
    if _is_installed:
        raise RuntimeError("NCCL's rules are already in force")
    _is_installed = True
    dist.isend, dist.irecv, dist.destroy_process_group = _isend, _irecv, _destroy_process_group
    try:
        yield
    finally:
        _is_installed = False
        _restore()


def under_nccl_rules(world, function: Callable, *arguments) -> object:
    """For the pool: `pool.run(P, under_nccl_rules, function, ...)` runs a function of ranks under the rules."""
    with nccl_rules():
        return function(world, *arguments)


def main() -> None:
    """Runs the module named first, with the arguments after it, as `python -m` would, under the rules."""
    if len(sys.argv) < 2:
        sys.exit("usage: torchrun ... -m tests.nccl_rules MODULE [its arguments]")
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    with nccl_rules():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
