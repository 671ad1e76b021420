"""A sum over the ranks of a pipeline that takes no time of its own: it goes down the line as the ranks come to rest."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from step2_comms.world import World

CALL = "sum over all ranks"


class Relay:
    """The sum of all ranks' vectors, on every rank, as `World.sum` gives it, for ranks in a line.

    In a pipeline the last rank runs its last backward first, and rank 0 runs it last. So each rank adds its values to
    those that come from the rank after it and passes them on as soon as its own row has run; when rank 0 has come to
    its end the sum is there already, and one message to each rank later all have it. An all-reduce starts when the
    last rank has come to it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ahead: tuple[Tensor, dist.Work] | None = None

    def post(self, num_values: int) -> None:
        """Posts the receive of a sum of so many float64 values; called before this rank's row runs."""
        world = self._world
        if world.rank + 1 < world.size:
            coming = torch.zeros(num_values, dtype=torch.float64)
            self._ahead = coming, self._post(dist.irecv, coming, world.rank + 1)

    def __call__(self, values: Tensor) -> Tensor:
        """The sum; values: this rank's, as many as were posted, added to in place. Called on every rank."""
        world = self._world
        if self._ahead is None:
            self.post(len(values))
        if self._ahead is not None:
            (coming, work), self._ahead = self._ahead, None
            self._wait(work, world.rank + 1)
            values += coming
        if world.rank == 0:
            # All are there to receive it, or will be in a moment: they have sent their values.
            works = [self._post(dist.isend, values, rank) for rank in range(1, world.size)]
            for rank, work in enumerate(works, 1):
                self._wait(work, rank)
            return values
        sent = self._post(dist.isend, values, world.rank - 1)
        total = torch.zeros_like(values)
        came = self._post(dist.irecv, total, 0)
        self._wait(sent, world.rank - 1)
        self._wait(came, 0)
        return total

    def _post(self, operation: Callable[..., dist.Work], values: Tensor, rank: int) -> dist.Work:
        peer = self._world.ranks[rank]
        with self._world.watch.waiting(CALL, peer):
            return operation(values, peer, group=self._world.group)

    def _wait(self, work: dist.Work, rank: int) -> None:
        with self._world.watch.waiting(CALL, self._world.ranks[rank]):
            work.wait()
