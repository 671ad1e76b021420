"""All parameters on rank 0, for the hash that says whether a run equals the monolith."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from step1_partition.stage import Stage
from step2_comms.world import World


def gather_parameters(world: World, stages: Mapping[int, Stage], rank_of_stage: Sequence[int]) -> list[Tensor] | None:
    """Every stage's parameters in layer order, on the CPU of rank 0; None elsewhere. Called on every rank."""
    own = {
        index: [parameter.detach().cpu().contiguous() for parameter in stage.parameters()]
        for index, stage in stages.items()
    }
    layouts = world.gather({i: [(tuple(x.shape), x.dtype) for x in tensors] for i, tensors in own.items()})
    gathered: list[Tensor] = []
    for index, owner in enumerate(rank_of_stage):
        if world.rank == 0 and owner == 0:
            gathered.extend(own[index])
        elif world.rank == 0:
            for shape, dtype in layouts[owner][index]:
                tensor = torch.empty(shape, dtype=dtype)
                with world.watch.waiting(f"recv of the weights of stage {index}", world.ranks[owner]):
                    dist.recv(tensor, world.ranks[owner])
                gathered.append(tensor)
        elif world.rank == owner:
            for tensor in own[index]:
                with world.watch.waiting(f"send of the weights of stage {index}", world.ranks[0]):
                    dist.send(tensor, world.ranks[0])
    return gathered if world.rank == 0 else None
