"""What all ranks must know before any of them updates its weights, from one sum over all ranks."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from step0_monolith.update import are_finite, norm_of
from step1_partition.stage import Stage
from step2_comms.world import World
from step5_orchestrator.global_norm import GlobalNorm
from step5_orchestrator.relay import Relay
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

    def __init__(self, world: World, stages: Mapping[int, Stage], num_stages: int, replica: int | None = None) -> None:
        """world: of the whole job. stages: this rank's. replica: this rank's number, where there are several: they have
        the same gradients, so that only those of replica 0 are part of the norm.
        """
        self._world, self._num_stages = world, num_stages
        self._parameters = {index: stage.parameters() for index, stage in stages.items()}
        self._norm = GlobalNorm(world, {} if replica else stages, num_stages)
        # Replicas come to their ends side by side, not one after the other.
        self._relay = Relay(world) if replica is None and world.size > 1 else None

    def begin(self, with_norm: bool) -> None:
        """Called on every rank before its row runs, so that nobody waits for what is known by then."""
        if self._relay is not None:
            self._relay.post(1 + self._num_stages + (self._norm.num_squares if with_norm else 0))

    def __call__(self, loss: Tensor, with_norm: bool) -> Agreed:
        """loss: what this rank knows of it, 0 if nothing; the sum over ranks is the loss. Called on every rank."""
        values = torch.zeros(1 + self._num_stages, dtype=torch.float64)
        values[0] = loss
        for index, parameters in self._parameters.items():
            if not are_finite(parameters):
                values[1 + index] = 1
        if with_norm:
            values = torch.cat([values, self._norm.squares()])
        if self._relay is not None:
            values = self._relay(values)
        elif self._world.size > 1:
            self._world.sum(values)
        total, *flags = values[: 1 + self._num_stages].tolist()
        wrong = [index for index, flag in enumerate(flags) if flag]
        places = " of " + named("stage", wrong) if wrong else None
        return Agreed(total, places, norm_of(values[1 + self._num_stages :]) if with_norm else None)
