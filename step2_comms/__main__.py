"""One activation travels along the line of ranks, and its gradient travels back."""

from typing import NamedTuple

import torch
from torch import Tensor

from step0_monolith.config import Config
from step0_monolith.options import RunError, parse, run_program
from step2_comms.contract import Message, describe, specs_of
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.p2p import Messages, edges_of_a_line
from step2_comms.world import World, open_world

SHAPE = (8, 16)
ACTIVATION, GRADIENT = "activation of microbatch 0", "gradient of microbatch 0"


class Report(NamedTuple):
    """What one rank found."""

    activation_is_right: bool
    gradient_is_right: bool
    bytes_sent: int


def first_input(device: torch.device | str = "cpu") -> Tensor:
    """What enters rank 0: the numbers 0 to 127 as a float32 tensor of shape (8, 16)."""
    return torch.arange(float(SHAPE[0] * SHAPE[1]), device=device).reshape(SHAPE).requires_grad_()


def open_line(world: World) -> Messages:
    """Opens the edges of a line of ranks and agrees on one activation ahead and one gradient back."""
    messages = Messages(world, edges_of_a_line(world.size))
    (spec,) = specs_of([first_input()])
    for rank in range(world.size - 1):
        if world.rank in (rank, rank + 1):
            messages.channel("forward", rank, rank + 1).agree([Message(ACTIVATION, (spec,))])
            messages.channel("backward", rank + 1, rank).agree([Message(GRADIENT, (spec,))])
    return messages


def there_and_back(world: World, messages: Messages) -> Report:
    """Each rank plays a stage y = 2 x, the last one with the loss sum(y); checks what it received.

    So rank r receives the first input times 2^r, and the gradient of what it sent is 2^(P-1-r) in all places: powers of
    two, which floats hold exactly.
    """
    first, last = world.rank == 0, world.rank == world.size - 1
    (x,) = (first_input(world.device),) if first else messages.recv_forward(ACTIVATION)
    y = 2 * x
    if last:
        gradient = torch.ones_like(y)
    else:
        messages.send_forward(ACTIVATION, [y])
        (gradient,) = messages.recv_backward(GRADIENT)
    y.backward(gradient)
    if not first:
        messages.send_backward(GRADIENT, [x.grad])
    return Report(
        torch.equal(x, first_input(world.device) * 2**world.rank),
        torch.equal(gradient, torch.full_like(gradient, 2 ** (world.size - 1 - world.rank))),
        messages.bytes_sent,
    )


def show(world: World, reports: list[Report]) -> None:
    """Prints what all ranks found. Raises RunError when one of them found a wrong value."""
    for rank, found in enumerate(reports):
        for what, is_right in ((ACTIVATION, found.activation_is_right), (GRADIENT, found.gradient_is_right)):
            if not is_right:
                raise RunError(f"rank {rank} has a wrong {what}")
    size, x = world.size, first_input()
    sent, predicted = [found.bytes_sent for found in reports], 2 * (size - 1) * x.nbytes
    ranks, powers = [str(rank) for rank in range(size)], [str(2**rank) for rank in range(size)]
    print(f"contract of each edge: {describe(specs_of([x]))} ahead, the same back")
    print(f"ahead  {' -> '.join(ranks)}   activation times {', '.join(powers)}")
    print(f"back   {' <- '.join(ranks)}   gradient {', '.join(reversed(powers))}")
    print(f"verified on {size} ranks: every value of every activation and gradient")
    print(f"bytes sent: {' + '.join(map(str, sent))} = {sum(sent)}, predicted {predicted}")


def main() -> None:
    """The command."""
    takes = {WorldOptions: None, Config: ("threads",)}
    world_options, config = parse(torchrun_command("step2_comms"), __doc__, takes)
    launch = read_launch("step2_comms", at_least=2)
    with open_world(launch, world_options, config.threads) as world:
        table = world.gather((world.device, world.backend))
        if world.rank == 0:
            print("rank  device  backend")
            for rank, (device, backend) in enumerate(table):
                print(f"{rank:4d}  {device!s:6}  {backend}")
        messages = open_line(world)
        reports = world.gather(there_and_back(world, messages))
        messages.close()
        if world.rank == 0:
            show(world, reports)


if __name__ == "__main__":
    run_program(main)
