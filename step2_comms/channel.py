"""One direction between two ranks: messages that leave and arrive in the agreed order, each waited for exactly once."""

import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from step0_monolith.model import Tensors
from step2_comms.contract import (
    ContractError,
    Message,
    Script,
    Spec,
    describe,
    from_json,
    same_layout,
    specs_of,
    to_json,
)
from step2_comms.world import World

MAX_SENDS_UNDER_WAY = 2


class Handle:
    """A message under way. `wait()` returns its tensors; the second and later calls return them again."""

    def __init__(self, channel: "Channel", call: str, works: list, buffers: list[Tensor], specs: Sequence[Spec]) -> None:
        self._channel, self._call, self._works = channel, call, works
        # The buffers are held until the wait: gloo reads and writes them until then.
        self._buffers, self._specs = buffers, specs
        self._tensors: Tensors | None = None

    def wait(self) -> Tensors:
        """Waits until the message has been handed over (send) or is here (receive).

        Raises RunError that names the root when the peer is lost or the timeout passes.
        """
        if self._tensors is None:
            watch = self._channel.world.watch
            before = watch.doing
            watch.doing = ("waits", self._call, self._channel.peer, time.monotonic())
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise watch.explained(error) from error
            watch.doing = before
            self._works = []
            self._tensors = self._channel.finished(self, self._buffers, self._specs)
            self._buffers = []
        return self._tensors


class Channel:
    """Messages from rank `source` to rank `destination`, over a communicator of their own.

    direction: "forward" or "backward". The contract is a script: the messages of one pass in their order. Both ends
    walk through it, so the order itself says which microbatch a message belongs to; nothing else is sent along.
    """

    def __init__(self, world: World, direction: str, source: int, destination: int, group: dist.ProcessGroup) -> None:
        self.world, self.source, self.destination = world, source, destination
        self.direction = direction
        self.name = f"{direction} {source} to {destination}"
        self.is_sender = world.rank == source
        self.peer = destination if self.is_sender else source
        self.bytes_sent = 0
        self._group = group
        self._scripts: dict[str, Script] = {}
        self._versions: dict[str, int] = {}
        self._pass, self._position = "", 0
        self._under_way: deque[Handle] = deque()

    def agree(self, script: Script | None = None, name: str = "") -> Script:
        """Agrees on the messages of a pass called `name`; called on both ends when the edge opens or changes.

        The sender gives the script. The receiver learns it; if it gives one of its own, the two must agree in every
        label, shape and dtype. Raises ContractError on the end that sees the difference.
        """
        version = self._versions[name] = self._versions.get(name, 0) + 1
        key = f"contract/{self.name}/{name}/{version}"
        if self.is_sender:
            self.world.store.set(key, to_json(script))
        else:
            with self.world.watch.waiting(f"the contract of {self.name}", self.peer):
                agreed = from_json(self.world.store.get(key))
            if script is not None:
                self._compare(agreed, script)
            script = agreed
        self._scripts[name] = script
        if self._pass == name:
            self._position = 0
        return script

    def begin(self, name: str) -> None:
        """The next message is the first of the pass called `name`."""
        self._pass, self._position = name, 0

    def _compare(self, agreed: Script, wanted: Script) -> None:
        for theirs, mine in zip(agreed, wanted, strict=False):
            if theirs.label != mine.label or not same_layout(theirs.specs, mine.specs):
                self._refuse(
                    f"{self.name}: rank {self.source} sends {theirs.label} with {describe(theirs.specs)}, but rank "
                    f"{self.destination} expects {mine.label} with {describe(mine.specs)}"
                )
        if len(agreed) != len(wanted):
            self._refuse(
                f"{self.name}: rank {self.source} sends {len(agreed)} messages, rank {self.destination} expects "
                f"{len(wanted)}"
            )

    def _next(self, label: str) -> Message:
        """The message whose turn it is, which must be the one asked for (None asks for whichever it is)."""
        script = self._scripts.get(self._pass)
        if not script:
            self._refuse(f"{self.name}: no message was agreed on; both ends call agree() first")
        message = script[self._position % len(script)]
        if label != message.label:
            self._refuse(
                f"{self.name}: rank {self.world.rank} comes with {label}, but it is the turn of {message.label}"
            )
        self._position += 1
        return message

    def _refuse(self, reason: str) -> None:
        """Raises ContractError here, and ends the peer's wait so that it raises too, with the same reason."""
        error = ContractError(reason)
        self.world.watch.failed(error)
        self.close()
        raise error

    def send(self, label: str, tensors: Sequence[Tensor]) -> Handle:
        """Starts sending; the tensors must not change until the handle's wait.

        Raises ContractError on both ends, before anything is sent, when label, shapes or dtypes are not those of the
        script. Handles may be dropped: the channel keeps them, and waits for the oldest when a third would be under
        way, so that sent tensors do not pile up.
        """
        message = self._next(label)
        found = specs_of(tensors)
        if not same_layout(found, message.specs):
            self._refuse(
                f"{self.name}: {label} was agreed as {describe(message.specs)}, but rank {self.source} was about to "
                f"send {describe(found)}"
            )
        while len(self._under_way) >= MAX_SENDS_UNDER_WAY:
            self._under_way[0].wait()
        buffers = [self._outgoing(tensor.detach()) for tensor in tensors]
        works = self._post(dist.isend, buffers, self.destination)
        self.bytes_sent += sum(buffer.nbytes for buffer in buffers)
        call = f"send_{self.direction} to rank {self.destination} ({label})"
        handle = Handle(self, call, works, buffers, ())
        self._under_way.append(handle)
        return handle

    def receive(self, label: str) -> Handle:
        """Posts the receive of the next message; its tensors come from the handle's wait.

        Raises ContractError when `label` is not the next message of the script.
        """
        message = self._next(label)
        pinned = self.world.is_staged
        device = torch.device("cpu") if pinned else self.world.device
        buffers = [torch.empty(s.shape, dtype=s.dtype, device=device, pin_memory=pinned) for s in message.specs]
        works = self._post(dist.irecv, buffers, self.source)
        call = f"recv_{self.direction} from rank {self.source} ({label})"
        handle = Handle(self, call, works, buffers, message.specs)
        self._under_way.append(handle)
        return handle

    def _post(self, operation, buffers: list[Tensor], peer: int) -> list:
        try:
            return [operation(buffer, peer, group=self._group) for buffer in buffers]
        except (RuntimeError, ValueError) as error:
            watch = self.world.watch
            watch.doing = ("waits", f"{operation.__name__} with rank {peer}", peer, time.monotonic())
            raise watch.explained(error) from error

    def _outgoing(self, tensor: Tensor) -> Tensor:
        if not self.world.is_staged:
            return tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return host

    def finished(self, handle: Handle, buffers: list[Tensor], specs: Sequence[Spec]) -> Tensors:
        """Called by a handle after its wait: forgets the handle, hands out what was received."""
        self._under_way.remove(handle)
        received = (buffer.to(self.world.device) for buffer in buffers[: len(specs)])
        return tuple(x.requires_grad_(s.requires_grad) for x, s in zip(received, specs, strict=True))

    def flush(self) -> None:
        """Waits for everything under way, sends and receives."""
        while self._under_way:
            self._under_way[0].wait()

    def close(self) -> None:
        """Closes the communicator; a peer that waits in it fails at once."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
