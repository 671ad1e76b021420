"""What all ranks must know before any of them updates its weights, from one sum over all ranks."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from step0_monolith.update import are_finite, norm_of
from step1_partition.stage import Stage
from step2_comms.world import World
from step5_orchestrator.global_norm import GlobalNorm
from step5_orchestrator.words import named


class Agreed(NamedTuple):
    """loss: of the whole batch. places: where gradients are not finite, such as " of stage 1", if anywhere. norm: of
    all gradients, when it was asked for.
    """

    loss: float
    places: str | None
    norm: float | None


class Agreement:
    """The same loss, the same norm, and the same verdict on every rank, so that either all update or none.

    A flag for each stage says whether its gradients are finite. A maximum over ranks would not do: it can hide a NaN.
    """

    def __init__(self, world: World, stages: Mapping[int, Stage], num_stages: int, counts: bool = True) -> None:
        """world: of the whole job. stages: this rank's. counts: whether this rank's gradients are part of the norm; of
        several replicas, which have the same ones, only one's are.
        """
        self._world, self._stages, self._num_stages, self._counts = world, stages, num_stages, counts
        self._norm = GlobalNorm(world, stages if counts else {}, num_stages)

    def __call__(self, loss: Tensor, with_norm: bool) -> Agreed:
        """loss: what this rank knows of it, 0 if nothing; the sum over ranks is the loss. Called on every rank."""
        values = torch.zeros(1 + self._num_stages, dtype=torch.float64)
        values[0] = loss
        for index, stage in self._stages.items():
            values[1 + index] = not are_finite(stage.parameters())
        if with_norm:
            values = torch.cat([values, self._norm.squares()])
        if self._world.size > 1:
            self._world.sum(values)
        wrong = [index for index, flag in enumerate(values[1 : 1 + self._num_stages].tolist()) if flag]
        places = " of " + named("stage", wrong) if wrong else None
        return Agreed(values[0].item(), places, norm_of(values[1 + self._num_stages :]) if with_norm else None)
