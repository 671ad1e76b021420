"""What ranks do in the tests of steps 5 and 6: train a config, or run modules of any kind, under any table."""

import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.result import raw_bytes
from step1_partition.partition import bounds, partition, split
from step1_partition.stage import Stage
from step5_orchestrator.optimizer import PipelineParallelOptimizer
from step5_orchestrator.pipeline import Pipeline
from step5_orchestrator.table import Table
from step5_orchestrator.trainer import Trainer
from step6_schedules.schedules import SCHEDULES
from step6_schedules.split_backward import SplitStage
from tests.monolith import assert_same_bits, joined, monolith, named


@dataclass
class Trained:
    """One rank's part of a finished training; state_sha256: of its parameters and its optimizer's state together."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    weights_sha256: str | None
    peak_in_flight: int
    result: object
    test: dict | None
    state_sha256: str


@dataclass(frozen=True)
class Job:
    """A config and the schedule, by name or as a table, to train it under; with replicas the table is one replica's."""

    config: Config
    schedule: str | Table
    layers_per_stage: tuple[int, ...] | None = None
    num_chunks: int | None = None
    data_parallel: int = 1

    def __str__(self) -> str:
        c = self.config
        name = self.schedule if isinstance(self.schedule, str) else self.schedule.name
        replicas = f"D={self.data_parallel} " if self.data_parallel > 1 else ""
        return f"{replicas}{name} m={c.num_microbatches} {c.optimizer} {c.dtype} {self.layers_per_stage or ''}"


def table_of(job: Job, num_ranks: int) -> Table:
    """The table that a job trains under, on so many ranks a replica."""
    if isinstance(job.schedule, Table):
        return job.schedule
    return SCHEDULES[job.schedule].table(num_ranks, job.config.num_microbatches, job.num_chunks)


def stage_class_for(table: Table) -> type[Stage]:
    """The plain stage, or the one that can split its backward where the table does."""
    return SplitStage if "W" in table.ops else Stage


def train_job(world, job: Job) -> Trained:
    """Trains one job on this rank; the gradients are those of the first update."""
    table = table_of(job, world.size // job.data_parallel)
    trainer = Trainer(
        job.config,
        world,
        table,
        layers_per_stage=job.layers_per_stage,
        stage_class=stage_class_for(table),
        data_parallel=job.data_parallel,
    )
    for _ in range(job.config.accumulate):
        trainer.step()
    stages = trainer.pipeline.stages.values()
    gradients = joined([named(s.modules, s.first_layer, gradients=True) for s in stages])
    trainer.train()
    result = trainer.result()
    test = trainer.evaluate()
    trainer.close()
    parameters = joined([named(s.modules, s.first_layer) for s in stages])
    digest = result.weights_sha256 if result else None
    peak = trainer.pipeline.executor.peak_in_flight
    state = state_sha256(trainer.optimizer)
    return Trained(trainer.losses, gradients, parameters, digest, peak, result, test, state)


def state_sha256(optimizer: PipelineParallelOptimizer) -> str:
    """Of all that the optimizer saves; the bytes of `serialize` will not do, their header has no fixed order."""
    tensors, scalars = optimizer.state()
    found = hashlib.sha256(json.dumps(scalars).encode())
    for name in sorted(tensors):
        found.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode() + raw_bytes(tensors[name]))
    return found.hexdigest()


def train_jobs(world, jobs: list[Job]) -> list[Trained]:
    """Trains one job after another on the same ranks."""
    return [train_job(world, job) for job in jobs]


def assert_equals_monolith(ranks: list[Trained], job: Job) -> None:
    """Losses, the first batch's gradients, the final weights and their hash have the monolith's bits."""
    expected = monolith(job.config)
    for rank, trained in enumerate(ranks):
        assert trained.losses == expected.losses, f"{job}: losses of rank {rank}"
    count = assert_same_bits(joined([r.gradients for r in ranks]), expected.gradients)
    assert assert_same_bits(joined([r.parameters for r in ranks]), expected.parameters) == count
    assert count == 2 * job.config.num_layers
    assert ranks[0].weights_sha256 == expected.weights_sha256, f"{job}: hash"
    assert all(r.weights_sha256 is None for r in ranks[1:])


def run_modules(world, make, sizes, inputs, targets, num_microbatches, schedule, autocast=False, iterations=1):
    """Runs modules made by `make` under a schedule; returns this rank's loss, and gradients and buffers by name."""
    torch.manual_seed(3)
    modules = make()
    table = SCHEDULES[schedule](world.size, num_microbatches)
    sizes = sizes or partition(len(modules), table.num_stages)
    parts, starts = split(modules, sizes), [start for start, _ in bounds(sizes)]
    stages = {i: stage_class_for(table)(parts[i], starts[i]) for i in table.stages_of(world.rank)}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pipeline = Pipeline(world, stages, table)
        pipeline.open("train", inputs.shape, inputs.dtype)
        for iteration in range(iterations):
            loss = pipeline.run(inputs, targets, iteration)
        pipeline.close()
    gradients = joined([named(s.modules, s.first_layer, gradients=True) for s in stages.values()])
    return loss, gradients, joined([buffers_of(s) for s in stages.values()])


def buffers_of(stage: Stage) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": value.clone()
        for index, module in enumerate(stage.modules, stage.first_layer)
        for name, value in module.named_buffers()
    }


def linear_chain(width: int = 8, num_layers: int = 4) -> list[nn.Module]:
    """A chain of linear layers in float64, for cases that need no particular module."""
    torch.manual_seed(7)
    return [nn.Linear(width, 10 if i == num_layers - 1 else width, dtype=torch.float64) for i in range(num_layers)]


def first_batch(config: Config) -> tuple[Tensor, Tensor]:
    return batch(config, 0)
