"""The four messages of a pipeline: activations travel forward, gradients travel backward."""

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from step0_monolith.model import Tensors
from step2_comms.channel import Channel, Handle
from step2_comms.world import World

Edge = tuple[str, int, int]  # direction, source, destination


def edges_of_a_line(num_ranks: int) -> list[Edge]:
    """The edges of a pipeline with one stage a rank: forward to the next rank, backward to the one before."""
    return [
        edge for rank in range(num_ranks - 1) for edge in (("forward", rank, rank + 1), ("backward", rank + 1, rank))
    ]


class Messages:
    """A rank's messages to and from its neighbours, each direction over a communicator of its own.

    The four messages have this in common. `label` names the message; it must be the next one of the edge's contract
    (`Channel.agree`), as must shapes and dtypes. `peer` is the other rank, by default the neighbour in a line of
    ranks. With `wait=True` a call returns when the message has been handed over: () for a send, the tensors for a
    receive. With `wait=False` it returns a Handle at once. Raises KeyError when there is no such edge, ContractError
    before anything is sent when the contract would be broken, RunError when the peer is lost or the timeout passes.
    """

    def __init__(self, world: World, edges: Iterable[Edge], travel_seconds: float = 0.0) -> None:
        """Opens this rank's part of `edges`; every rank gives the same list. travel_seconds: what each message takes at
        least, to emulate a slow network. Where the world is one of several parts, all of them open theirs.
        """
        self.world = world
        self._channels: dict[Edge, Channel] = {}
        # Every rank opens every edge, in one common order: torch numbers groups as they are opened, so that the members
        # of a group recognise each other by that number, and nobody waits in a circle.
        for edge in sorted(set(edges)):
            for ranks in world.parts:
                # Below this class ranks are those of the whole world, so that errors name them.
                direction, source, destination = edge[0], ranks[edge[1]], ranks[edge[2]]
                members = sorted((source, destination))
                if world.whole.rank not in members:
                    dist.new_group(members, timeout=world.timeout)
                    continue
                peer = destination if world.whole.rank == source else source
                with world.watch.waiting(f"opening the edge {direction} {source} to {destination}", peer):
                    group = dist.new_group(members, timeout=world.timeout)
                self._channels[edge] = Channel(world.whole, direction, source, destination, group, travel_seconds)
        world.at_close.append(self.close)

    def channel(self, direction: str, source: int, destination: int) -> Channel:
        """The channel of one edge. Raises KeyError when this rank has no such edge."""
        return self._channels[direction, source, destination]

    def send_forward(
        self, label: str, activations: Sequence[Tensor], *, wait: bool = True, peer: int | None = None
    ) -> Tensors | Handle:
        """Sends a stage's outputs to the rank of the next stage, rank + 1 by default."""
        # BEGIN SOLUTION step2.send_forward
        peer = self.world.rank + 1 if peer is None else peer
        handle = self.channel("forward", self.world.rank, peer).send(label, activations)
        return _now_or_later(handle, wait)
        # END SOLUTION

    def recv_forward(self, label: str, *, wait: bool = True, peer: int | None = None) -> Tensors | Handle:
        """Receives a stage's inputs from the rank of the stage before, rank - 1 by default."""
        # BEGIN SOLUTION step2.recv_forward
        peer = self.world.rank - 1 if peer is None else peer
        handle = self.channel("forward", peer, self.world.rank).receive(label)
        return _now_or_later(handle, wait)
        # END SOLUTION

    def send_backward(
        self, label: str, gradients: Sequence[Tensor], *, wait: bool = True, peer: int | None = None
    ) -> Tensors | Handle:
        """Sends the gradients of a stage's inputs to the rank of the stage before, rank - 1 by default."""
        # BEGIN SOLUTION step2.send_backward
        peer = self.world.rank - 1 if peer is None else peer
        handle = self.channel("backward", self.world.rank, peer).send(label, gradients)
        return _now_or_later(handle, wait)
        # END SOLUTION

    def recv_backward(self, label: str, *, wait: bool = True, peer: int | None = None) -> Tensors | Handle:
        """Receives the gradients of a stage's outputs from the rank of the next stage, rank + 1 by default."""
        # BEGIN SOLUTION step2.recv_backward
        peer = self.world.rank + 1 if peer is None else peer
        handle = self.channel("backward", peer, self.world.rank).receive(label)
        return _now_or_later(handle, wait)
        # END SOLUTION

    def begin(self, name: str) -> None:
        """All channels start the pass called `name`."""
        for channel in self._channels.values():
            channel.begin(name)

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent so far."""
        return sum(channel.bytes_sent for channel in self._channels.values())

    def flush(self) -> None:
        """Waits for everything under way."""
        for channel in self._channels.values():
            channel.flush()

    def close(self) -> None:
        """Waits for everything under way, then closes the communicators."""
        self.flush()
        for channel in self._channels.values():
            channel.close()


def _now_or_later(handle: Handle, wait: bool) -> Tensors | Handle:
    return handle.wait() if wait else handle
