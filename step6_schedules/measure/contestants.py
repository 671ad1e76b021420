"""Who runs the same iteration: this course, torch.distributed.pipelining, the table by hand, and the monolith.

Each is a call that runs one iteration on one batch that it holds: gradients to None, all microbatches forward and
backward, and the optimizer's step. All start from the same weights.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed.pipelining.schedules as library
from torch import nn
from torch.distributed.pipelining import PipelineStage

from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.loss import batch_weight, loss_share
from step0_monolith.model import layers
from step0_monolith.reference import forward_backward
from step0_monolith.update import make_optimizer
from step1_partition.stage import Stage
from step2_comms.world import World
from step4_sharded.shard import shard
from step5_orchestrator.cells import read_cell
from step5_orchestrator.csv_file import INNER
from step5_orchestrator.table import Table, make_table
from step5_orchestrator.trainer import Trainer
from step6_schedules.schedules import SCHEDULES
from step6_schedules.split_backward import SplitStage

# What the library calls the schedules that it has.
LIBRARY = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
ONE_CHUNK = ("gpipe", "1f1b")


def stages_of(name: str, rank: int, num_ranks: int) -> list[int]:
    """The stages that a rank holds in the library's schedule of that name."""
    if name in ONE_CHUNK:
        return [rank]
    return [rank, 2 * num_ranks - 1 - rank] if name in ("zb-v", "dualpipe-v") else [rank, rank + num_ranks]


class Library:
    """torch.distributed.pipelining, under its own schedule and in its own runtime."""

    def __init__(
        self, name: str, config: Config, world: World, stage_kind: type[PipelineStage] = PipelineStage
    ) -> None:
        own = stages_of(name, world.rank, world.size)
        num_stages = world.size * len(own)
        self.stages = [shard(config, num_stages, index, None, world.device) for index in own]
        theirs = [
            stage_kind(nn.Sequential(*stage.modules), index, num_stages, world.device)
            for index, stage in zip(own, self.stages, strict=True)
        ]
        inputs, targets = batch(config, 0)
        loss = partial(loss_share, weight=batch_weight(targets))
        kind = getattr(library, LIBRARY[name])
        # Losses are shares of the batch's already, so that gradients are not to be divided again.
        self.schedule = kind(
            theirs[0] if name in ONE_CHUNK else theirs, config.num_microbatches, loss_fn=loss, scale_grads=False
        )
        self._inputs = (inputs.to(world.device),) if 0 in own else ()
        self._targets = targets.to(world.device) if num_stages - 1 in own else None
        self._optimizer = make_optimizer(config, [p for stage in self.stages for p in stage.parameters()])

    def table(self, name: str, num_ranks: int, num_microbatches: int) -> Table:
        """The table that the library runs, for ours to run too."""
        if name in ONE_CHUNK:
            return SCHEDULES[name](num_ranks, num_microbatches)
        order = self.schedule.pipeline_order
        rows = [
            [read_cell(str(cell).replace(";", INNER)) for cell in order[rank] if cell is not None]
            for rank in range(num_ranks)
        ]
        pairs = [cell[0] for row in rows for cell in row if len(cell) == 2]
        return make_table(name, [[action for cell in row for action in cell] for row in rows], pairs)

    def __call__(self) -> None:
        """One iteration."""
        self._optimizer.zero_grad()
        if self._targets is None:
            self.schedule.step(*self._inputs)
        else:
            self.schedule.step(*self._inputs, target=self._targets, losses=[])
        self._optimizer.step()


def stage_class(table: Table) -> type[Stage]:
    """The plain stage, or the one that can split its backward where the table does."""
    return SplitStage if "W" in table.ops else Stage


class Ours:
    """This course's pipeline, doing exactly what the library's iteration does; part of `trainer`."""

    def __init__(self, config: Config, world: World, table: Table, **more) -> None:
        self.trainer = Trainer(config, world, table, stage_class=stage_class(table), **more)
        pipeline = self.trainer.pipeline
        self.stages = list(pipeline.stages.values())
        inputs, targets = batch(config, 0)
        self.batch = (inputs if pipeline.is_first else None, targets if pipeline.is_last else None)

    def __call__(self) -> None:
        """One iteration."""
        optimizer = self.trainer.optimizer.wrapped
        optimizer.zero_grad()
        self.trainer.pipeline.forward_backward(*self.batch)
        optimizer.step()

    def with_checks(self) -> None:
        """The same and what the library does not have: no update unless all gradients of all ranks are finite, and the
        loss on every rank.
        """
        self.trainer.optimizer.optimize(self.batch)

    def close(self) -> None:
        """Ends the pipeline's messages."""
        self.trainer.close()


class Monolith:
    """The whole model in one process."""

    def __init__(self, config: Config, num_microbatches: int | None = None, threads: int = 1) -> None:
        """num_microbatches: of the batch; None: the config's. threads: of the process while it runs."""
        self._num_microbatches, self._threads = num_microbatches or config.num_microbatches, threads
        self.layers, self._batch = layers(config), batch(config, 0)
        self._optimizer = make_optimizer(config, [p for layer in self.layers for p in layer.parameters()])

    def __call__(self) -> None:
        """One iteration."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._optimizer.zero_grad()
        forward_backward(self.layers, *self._batch, self._num_microbatches)
        self._optimizer.step()
        torch.set_num_threads(before)


def nothing() -> None:
    """What a rank runs that has no part in a contestant."""


def on_rank_0(world: World, make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """A contestant that one process runs, while the other ranks wait."""
    return make() if world.rank == 0 else nothing
