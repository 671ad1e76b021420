"""One direction between two ranks: messages that leave and arrive in the agreed order, each waited for exactly once."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

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
    fits,
    from_json,
    same_layout,
    specs_of,
    to_json,
)
from step2_comms.handle import Handle
from step2_comms.late import LateSends
from step2_comms.world import World

MAX_SENDS_UNDER_WAY = 2


class Channel:
    """Messages from rank `source` to rank `destination`, over a communicator of their own.

    direction: "forward" or "backward". The contract is a script: the messages of one pass in their order. Both ends
    walk through it, so the order itself says which microbatch a message belongs to; nothing else is sent along.
    """

    def __init__(
        self,
        world: World,
        direction: str,
        source: int,
        destination: int,
        group: dist.ProcessGroup,
        travel_seconds: float = 0.0,
    ) -> None:
        """travel_seconds: each message is held back that long, to emulate a slow network."""
        self.world, self.source, self.destination = world, source, destination
        self.direction = direction
        self.name = f"{direction} {source} to {destination}"
        self.is_sender = world.rank == source
        self.peer = destination if self.is_sender else source
        self.bytes_sent = 0
        self._group = group
        self._scripts: dict[str, Script] = {}
        self._pass, self._position = "", 0
        self._under_way: deque[Handle] = deque()
        # What `send` and `receive` call themselves in the words of an error.
        self._sends, self._receives = f"send_{direction} to rank {destination}", f"recv_{direction} from rank {source}"
        self.watch, self._is_staged, self._device = world.watch, world.is_staged, world.device
        self._late = LateSends(travel_seconds) if travel_seconds else None

    def agree(self, script: Script | None = None, name: str = "") -> Script:
        """Agrees on the messages of a pass called `name`; called on both ends when the edge opens or changes.

        The sender gives the script. The receiver learns it; if it gives one of its own, the two must agree in every
        label, shape and dtype. Raises ContractError on the end that sees the difference.
        """
        if self._group is None:
            self._refuse(f"{self.name}: the channel is closed")
        key = self.world.new_key(f"contract/{self.name}/{name}")
        if self.is_sender:
            if script is None:
                raise ValueError(f"{self.name}: rank {self.source} sends, so it gives the script")
            self.world.store.set(key, to_json(script))
        else:
            agreed = from_json(self.world.fetch(key, f"the contract of {self.name}", self.peer))
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
        """The message whose turn it is, which must be the one asked for."""
        if self._group is None:
            # Without a group torch would take the group of all ranks.
            self._refuse(f"{self.name}: the channel is closed")
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
        if not fits(tensors, message.specs):
            self._refuse(
                f"{self.name}: {label} was agreed as {describe(message.specs)}, but rank {self.source} was about to "
                f"send {describe(specs_of(tensors))}"
            )
        # What is held back on purpose does not count: it would hold back the sender too.
        while len(self._under_way) >= MAX_SENDS_UNDER_WAY and self._late is None:
            self._under_way[0].wait()
        buffers = [self._outgoing(tensor) for tensor in tensors]
        for buffer in buffers:
            self.bytes_sent += buffer.nbytes
        return self._post(f"{self._sends} ({label})", dist.isend, buffers, ())

    def receive(self, label: str, into: Sequence[Tensor] | None = None) -> Handle:
        """Posts the receive of the next message; its tensors come from the handle's wait.

        into: contiguous tensors that the message is written into, and that come back (on a rank whose messages are
        staged, only their shapes and dtypes count); None: new ones. Raises ContractError when `label` is not the next
        message of the script, or when they do not fit it.
        """
        message = self._next(label)
        if into is not None and not (fits(into, message.specs) and all(x.is_contiguous() for x in into)):
            self._refuse(
                f"{self.name}: {label} was agreed as {describe(message.specs)}, but rank {self.destination} was about "
                f"to receive into {describe(specs_of(into))} (contiguous tensors of the agreed kind are needed)"
            )
        buffers = self._places(message.specs) if into is None or self._is_staged else into
        return self._post(f"{self._receives} ({label})", dist.irecv, buffers, message.specs)

    def _places(self, specs: Sequence[Spec]) -> list[Tensor]:
        pinned = self._is_staged
        device = torch.device("cpu") if pinned else self._device
        return [torch.empty(s.shape, dtype=s.dtype, device=device, pin_memory=pinned) for s in specs]

    def _post(self, call: str, operation: Callable, buffers: Sequence[Tensor], specs: Sequence[Spec]) -> Handle:
        before = self.watch.waits(call, self.peer)
        post = partial(self._late.post, operation) if self._late is not None and self.is_sender else operation
        try:
            works = [post(buffer, self.peer, group=self._group) for buffer in buffers]
        except RuntimeError as error:
            raise self.watch.explained(error) from error
        self.watch.goes_on(before)
        handle = Handle(self, call, works, buffers, specs)
        self._under_way.append(handle)
        return handle

    def _outgoing(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not self._is_staged:
            is_ready = tensor.is_contiguous() and tensor.device == self._device
            return tensor if is_ready else tensor.to(self._device).contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return host

    def finished(self, handle: Handle, buffers: list[Tensor], specs: Sequence[Spec]) -> Tensors:
        """Called by a handle after its wait: forgets the handle, hands out what was received."""
        self._under_way.remove(handle)
        if not specs:
            return ()
        received = [buffer.to(self._device) for buffer in buffers] if self._is_staged else buffers
        return tuple([x.requires_grad_(s.requires_grad) for x, s in zip(received, specs, strict=True)])

    def flush(self) -> None:
        """Waits for everything under way, sends and receives; for nothing once this rank has failed."""
        while self._under_way and not self.world.watch.is_over:
            self._under_way[0].wait()

    def close(self) -> None:
        """Closes the communicator; a peer that waits in it fails at once. Closing twice is allowed."""
        # gloo keeps the connection as long as anybody holds a part of it, and each message under way does.
        while self._under_way:
            self._under_way.popleft().give_up()
        if self._late is not None:
            self._late.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
