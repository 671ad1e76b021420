"""The norm of all gradients of all stages, the same number with the same bits on every rank."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from step0_monolith.update import norm_of, squared_norms
from step1_partition.stage import Stage
from step2_comms.world import World


class GlobalNorm:
    """Adds the squares of all stages in layer order, as the monolith does.

    Each rank puts its squares into the places of its own parameters, and zeros elsewhere. The sum over ranks then has
    every square as it was, since adding zeros changes nothing, and each rank adds them in the same order. Norms of
    stages would be added in another order, and clipping each stage by its own norm is another method altogether.
    """

    def __init__(self, world: World, stages: Mapping[int, Stage], num_stages: int) -> None:
        """Sends nothing yet: the ranks learn of each other's parameters when the norm is first asked for."""
        self._world, self._stages, self._num_stages = world, stages, num_stages

    @cached_property
    def _ends(self) -> list[int]:
        """Stage s has places ends[s-1] .. ends[s]-1 among those of all parameters. First asked for on every rank."""
        counts = torch.zeros(self._num_stages, dtype=torch.float64)
        for index, stage in self._stages.items():
            counts[index] = len(stage.parameters())
        return self._world.sum(counts).cumsum(0).long().tolist()

    @property
    def num_squares(self) -> int:
        """Parameters of the whole model. First asked for on every rank."""
        return self._ends[-1]

    def squares(self) -> Tensor:
        """A float64 place for each parameter of the model, in layer order: this rank's squared norms, and zeros.

        Called on every rank.
        """
        # BEGIN SOLUTION step5.global_norm
        squares = torch.zeros(self._ends[-1], dtype=torch.float64)
        for index, stage in self._stages.items():
            found = squared_norms(stage.parameters())
            squares[self._ends[index] - len(found) : self._ends[index]] = found
        return squares
        # END SOLUTION

    def __call__(self) -> float:
        """The norm of the gradients as they are now; called on every rank."""
        return norm_of(self._world.sum(self.squares()))
