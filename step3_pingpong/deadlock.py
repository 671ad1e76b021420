"""torchrun ... -m step3_pingpong.deadlock: both ranks send first and wait for ever; and two cures."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from step0_monolith.options import Options, one_of, option, parse, run_program, whole
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step3_pingpong.round_trip import check_equal


@dataclass(frozen=True)
class DeadlockOptions(Options):
    """What the two ranks exchange, and how."""

    num_floats: int = option(10, whole(1, 2**28), "numbers in each of the two messages, 4 bytes each")
    cure: str = option(
        "none",
        one_of("none", "order", "isend"),
        "none: both send first; order: rank 1 receives first; isend: nobody waits before both have received",
    )


def both_send_first(world: World, outgoing: Tensor) -> Tensor:
    """Never returns: each `send` waits until the other rank receives, and neither gets that far.

    Raises RunError that names the circle when the timeout of the group has passed. The size does not matter: gloo's
    send returns only when the receiver has posted its buffer (other libraries copy small messages away, and such a
    program runs there until its messages grow).
    """
    _send(world, outgoing)
    return _receive(world, outgoing)


def one_receives_first(world: World, outgoing: Tensor) -> Tensor:
    """The first cure: the two ranks agree on an order, and rank 1 receives before it sends."""
    if world.rank == 0:
        _send(world, outgoing)
        return _receive(world, outgoing)
    incoming = _receive(world, outgoing)
    _send(world, outgoing)
    return incoming


def both_isend(world: World, outgoing: Tensor) -> Tensor:
    """The second cure: start the send, receive, and only then wait for the send.

    `outgoing` must not change before that wait: what the receiver gets would change with it.
    """
    peer = 1 - world.rank
    work = dist.isend(outgoing, peer)
    incoming = _receive(world, outgoing)
    with world.watch.waiting(f"isend to {peer} ({outgoing.numel():,} floats)", peer):
        work.wait()
    return incoming


EXCHANGES: dict[str, Callable[[World, Tensor], Tensor]] = {
    "none": both_send_first,
    "order": one_receives_first,
    "isend": both_isend,
}


def exchange(world: World, num_floats: int, cure: str) -> None:
    """Ranks 0 and 1 swap `num_floats` floats and check every one. Raises RunError after a deadlock or a wrong value."""
    received = EXCHANGES[cure](world, _floats(world.rank, num_floats))
    check_equal(f"message to rank {world.rank}", _floats(1 - world.rank, num_floats), received)


def _floats(rank: int, num_floats: int) -> Tensor:
    # A remainder below 2**24, so that every value is exact in float32 and differs from its neighbours.
    return ((torch.arange(num_floats) + rank) % 65521).float()


def _send(world: World, tensor: Tensor) -> None:
    peer = 1 - world.rank
    with world.watch.waiting(f"send to {peer} ({tensor.numel():,} floats)", peer):
        dist.send(tensor, peer)


def _receive(world: World, like: Tensor) -> Tensor:
    peer = 1 - world.rank
    incoming = torch.empty_like(like)
    with world.watch.waiting(f"recv from {peer} ({like.numel():,} floats)", peer):
        dist.recv(incoming, peer)
    return incoming


def main() -> None:
    """Runs one exchange between two ranks."""
    program = "step3_pingpong.deadlock"
    takes = {DeadlockOptions: None, WorldOptions: ("timeout",)}
    options, world_options = parse(torchrun_command(program, 2), __doc__, takes)
    launch = read_launch(program, at_least=2, at_most=2)
    # On the CPU: the rule "send waits for the receiver" is gloo's; NCCL queues both calls on the GPU instead.
    with open_world(launch, replace(world_options, device="cpu")) as world:
        exchange(world, options.num_floats, options.cure)
        world.gather("checked")  # rank 0 speaks for both only when rank 1 has checked its message too
        if world.rank == 0:
            print(f"cure {options.cure}: both ranks have all {options.num_floats:,} floats of the other")


if __name__ == "__main__":
    run_program(main)
