"""The forward pass of the sharded model: each rank runs its stage and hands the result on."""

from collections.abc import Sequence

from torch import Tensor

from step1_partition.stage import Stage
from step2_comms.contract import Message, specs_of
from step2_comms.p2p import Messages, edges_of_a_line
from step2_comms.world import World
from step4_sharded.boundaries import agree_on_boundaries


def sharded_forward(world: World, stage: Stage, pieces: Sequence[Tensor] | None) -> list[Tensor]:
    """Runs all microbatches through the ranks, one stage a rank; returns the outputs on the last rank, else [].

    pieces: the microbatches, each (N, D); needed on rank 0 alone.
    """
    first, last = world.rank == 0, world.rank == world.size - 1
    messages = Messages(world, edges_of_a_line(world.size))
    inputs = [specs_of((piece,)) for piece in pieces] if first else None
    boundaries = agree_on_boundaries(world, {world.rank: stage}, range(world.size), inputs, "forward")
    if not first:
        script = [Message(f"microbatch {m}", specs) for m, specs in enumerate(boundaries[world.rank])]
        messages.channel("forward", world.rank - 1, world.rank).agree(script)
    if not last:
        script = [Message(f"microbatch {m}", specs) for m, specs in enumerate(boundaries[world.rank + 1])]
        messages.channel("forward", world.rank, world.rank + 1).agree(script)

    outputs = []
    for m in range(len(boundaries[world.rank])):
        values = (pieces[m].to(world.device),) if first else messages.recv_forward(f"microbatch {m}")
        values = stage.evaluate(values)
        if last:
            outputs.extend(values)
        else:
            messages.send_forward(f"microbatch {m}", values, wait=False)
    messages.close()
    return outputs
