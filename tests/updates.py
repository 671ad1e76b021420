"""Modules of any kind, trained with any optimizer: by all ranks of a pipeline, and uncut in one process."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from step0_monolith.loss import batch_weight
from step0_monolith.reference import forward_backward
from step0_monolith.update import norm_of, squared_norms, update_weights
from step1_partition.partition import bounds, partition, split
from step5_orchestrator.optimizer import PipelineParallelOptimizer
from step5_orchestrator.pipeline import Pipeline
from step5_orchestrator.replicas import Replicas
from step6_schedules.schedules import SCHEDULES
from tests.monolith import named
from tests.training import stage_class_for, state_sha256

WIDTH = 8


def chain(dtype: torch.dtype = torch.float64, num_linear: int = 4) -> list[nn.Module]:
    """Linear layers and ReLUs in turn, so that a stage of one module may have no parameters."""
    torch.manual_seed(7)
    modules = [
        module for _ in range(num_linear - 1) for module in (nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.ReLU())
    ]  # fmt: skip
    return [*modules, nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Linear(WIDTH, 10, dtype=dtype)]


def chain32() -> list[nn.Module]:
    return chain(torch.float32)


def chain16() -> list[nn.Module]:
    return chain(torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """What is trained, and how. rows: of a batch. ignored: whether some targets are -100, other rows in each batch."""

    optimizer: Callable[[list], torch.optim.Optimizer]
    make: Callable[[], list[nn.Module]] = chain
    schedule: str = "1f1b"
    num_microbatches: int = 3
    rows: int = 8
    sizes: tuple[int, ...] | None = None
    num_iterations: int = 4
    max_grad_norm: float | None = None
    accumulate: int = 1
    on_nonfinite: str = "stop"
    rate: Callable[[int], float] | None = None
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    ignored: bool = False
    data: Callable[["Case", int], tuple[Tensor, Tensor]] | None = None  # instead of those of `batch_of`
    data_parallel: int = 1

    def __str__(self) -> str:
        name = getattr(self.optimizer, "func", self.optimizer).__name__
        return f"{name} {self.make.__name__} {self.schedule} m={self.num_microbatches} clip {self.max_grad_norm}"


def batch_of(case: Case, iteration: int) -> tuple[Tensor, Tensor]:
    """The whole batch of an iteration."""
    if case.data is not None:
        return case.data(case, iteration)
    generator = torch.Generator().manual_seed(100 + iteration)
    dtype = next(p for module in case.make() for p in module.parameters()).dtype
    inputs = torch.randn(case.rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(10, (case.rows,), generator=generator)
    if case.ignored:
        targets[torch.randperm(case.rows, generator=generator)[: case.rows // 2]] = -100
    return inputs, targets


def build(world, case: Case, share: Callable | None = None) -> PipelineParallelOptimizer:
    """A fresh pipeline with its optimizer, on every rank."""
    replicas = Replicas(world, case.data_parallel) if case.data_parallel > 1 else None
    within = world if replicas is None else replicas.pipeline
    modules = case.make()
    table = SCHEDULES[case.schedule](within.size, case.num_microbatches)
    sizes = case.sizes or partition(len(modules), table.num_stages)
    parts, starts = split(modules, sizes), [start for start, _ in bounds(sizes)]
    stages = {s: stage_class_for(table)(parts[s], starts[s]) for s in table.stages_of(within.rank)}
    pipeline = Pipeline(within, stages, table, **({} if share is None else {"share": share}))
    wrapped = case.optimizer([{"params": [p for p in pipeline.parameters() if p.requires_grad]}])
    return PipelineParallelOptimizer(
        wrapped,
        pipeline,
        case.num_microbatches,
        case.max_grad_norm,
        accumulate=case.accumulate,
        on_nonfinite=case.on_nonfinite,
        lr_schedule=case.rate or (case.scheduler and case.scheduler(wrapped)),
        replicas=replicas,
    )


def part_of(optimizer: PipelineParallelOptimizer, batch: tuple[Tensor, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """What this rank needs of a batch: its replica's rows of the inputs, of the targets, or nothing."""
    inputs, targets = batch
    if optimizer.replicas is not None:
        count, index = optimizer.replicas.num_replicas, optimizer.replicas.index
        inputs, targets = inputs.tensor_split(count)[index], targets.tensor_split(count)[index]
    return (inputs if optimizer.pipeline.is_first else None, targets if optimizer.pipeline.is_last else None)


def go_on(optimizer: PipelineParallelOptimizer, case: Case, until: int | None = None) -> list[float]:
    """The iterations that are not done yet; returns their losses."""
    until = case.num_iterations if until is None else until
    return [
        optimizer.optimize(part_of(optimizer, batch_of(case, iteration))).item()
        for iteration in range(optimizer.iterations, until)
    ]


def parameters_of(optimizer: PipelineParallelOptimizer) -> dict[str, Tensor]:
    """This rank's parameters by global name."""
    return {
        name: value
        for index, module in optimizer.pipeline.layers().items()
        for name, value in named([module], index).items()
    }


def train_cases(world, cases: list[Case]) -> list[tuple[list[float], dict[str, Tensor], str]]:
    """Trains one case after another on the same ranks: losses, parameters, and a digest of the whole state."""
    found = []
    for case in cases:
        optimizer = build(world, case)
        found.append((go_on(optimizer, case), parameters_of(optimizer), state_sha256(optimizer)))
        optimizer.pipeline.close()
    return found


@dataclass
class Uncut:
    """The same training in one process."""

    losses: list[float]
    parameters: dict[str, Tensor]
    optimizer: Any


def uncut(case: Case, left_out: Collection[int] = ()) -> Uncut:
    """Trains the modules in one piece, in the order of additions that the pipeline keeps.

    left_out: updates that are not made.
    """
    modules = case.make()
    parameters = [*dict.fromkeys(p for module in modules for p in module.parameters())]
    optimizer = case.optimizer([{"params": [p for p in parameters if p.requires_grad]}])
    scheduler = case.scheduler and case.scheduler(optimizer)
    losses, updates, count = [], 0, case.num_microbatches * case.data_parallel
    for iteration in range(case.num_iterations):
        update, part = divmod(iteration, case.accumulate)
        inputs, targets = batch_of(case, iteration)
        if part == 0:
            optimizer.zero_grad()
        loss = forward_backward(
            modules, inputs, targets, count, iteration=update, first_microbatch=part * count,
            weight=batch_weight(targets) * case.accumulate,
        )  # fmt: skip
        losses.append(loss.item() * case.accumulate)
        if part == case.accumulate - 1 and update not in left_out:
            norm = None if case.max_grad_norm is None else norm_of(squared_norms(parameters))
            update_weights(optimizer, case.rate and case.rate(updates), norm, case.max_grad_norm)
            if scheduler is not None:
                scheduler.step()
            updates += 1
    return Uncut(losses, named(modules), optimizer)
