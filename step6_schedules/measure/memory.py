"""torchrun --standalone --nproc-per-node 2 -m step6_schedules.measure.memory: bytes of activations, against the table.

For each schedule: the most that a rank holds at once for its backward passes, against what the table says it has in
flight times what one microbatch takes. For some: whether iteration 200 holds as much as iteration 20.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from step0_monolith.config import Config
from step0_monolith.data import batch, microbatches
from step0_monolith.loss import batch_weight, loss_share
from step0_monolith.options import Options, option, parse, run_program, whole
from step1_partition.stage import Stage
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step4_sharded.shard import shard
from step5_orchestrator.actions import Action, Value, needs
from step5_orchestrator.lowering import Instruction, Receive
from step5_orchestrator.trainer import Trainer
from step6_schedules.ledger import Ledger
from step6_schedules.measure.figures import Figure
from step6_schedules.measure.program import MeasureOptions, chosen_from, config_of, save
from step6_schedules.schedules import SCHEDULES
from step6_schedules.simulate import Simulation
from step6_schedules.split_backward import SplitStage

PROGRAM = "step6_schedules.measure.memory"
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
LONG = ("1f1b", "zb-v")  # one whole and one split backward, over many iterations
EARLY = 20
GOAL, FLAT = 1.05, 1.01


@dataclass(frozen=True)
class MemoryOptions(Options):
    """What runs."""

    schedules: tuple[str, ...] = option(NAMES, chosen_from(SCHEDULES), "schedules to measure")
    num_iterations: int = option(
        200, whole(EARLY, 100_000), f"iterations of {' and '.join(LONG)}, the last compared with number {EARLY}"
    )


class Held:
    """What a rank holds for its backward passes. activations: what autograd has saved, as long as anybody holds it.
    with_gradients: also what a split backward keeps from I to W, of which autograd does not know.
    """

    def __init__(self, before: Sequence[Tensor] = ()) -> None:
        self.activations, self.with_gradients = Ledger(before), Ledger(before)

    def watching(self) -> saved_tensors_hooks:
        """Inside, all that autograd saves is noted."""
        return saved_tensors_hooks(self._save, lambda tensor: tensor)

    def _save(self, tensor: Tensor) -> Tensor:
        self.activations.note(tensor)
        self.with_gradients.note(tensor)
        return tensor

    def watch_split(self, stage: SplitStage) -> None:
        """From here on, what its I keeps for its W is noted."""
        run = stage.backward_input

        def noted(microbatch: int, gradients):
            result = run(microbatch, gradients)
            for gradient, *_ in stage._kept[microbatch].late:
                self.with_gradients.note(gradient)
            return result

        stage.backward_input = noted


def bytes_of_stages(config: Config, num_stages: int) -> list[int]:
    """What a forward of one microbatch through each stage alone leaves behind for its backward."""
    inputs, targets = batch(config, 0)
    rows, labels = (microbatches(x, config.num_microbatches)[0] for x in (inputs, targets))
    loss = partial(loss_share, targets=labels, weight=batch_weight(targets))
    found = []
    for index in range(num_stages):
        stage = shard(config, num_stages, index)
        x = torch.zeros(len(rows), config.width, dtype=config.torch_dtype, requires_grad=True) if index else rows
        held = Held([*stage.parameters(), inputs, targets])
        with held.watching():
            stage.forward(0, (x,), loss=loss if index == num_stages - 1 else None)
        found.append(held.activations.held)
    return found


def posted_ahead(row: Sequence[Instruction], num_bytes: Callable[[Value], int]) -> int:
    """The most bytes of receives that a row has posted and no action has taken yet."""
    posted, peak = {}, 0
    for instruction in row:
        if isinstance(instruction, Receive):
            posted[instruction.value] = num_bytes(instruction.value)
            peak = max(peak, sum(posted.values()))
        elif isinstance(instruction, Action):
            for value in needs(instruction):
                posted.pop(value, None)
    return peak


class Iteration(NamedTuple):
    """Bytes: the most activations of one iteration, the same with gradients kept for W; the resident set after it."""

    activations: int
    with_gradients: int
    resident: int


class Rank(NamedTuple):
    """What one rank found, and predicted: the most activations that its row has in flight, in bytes."""

    iterations: list[Iteration]
    predicted: float
    posted_ahead: int


def run(world: World, config: Config, name: str, num_iterations: int) -> Rank:
    """Trains under a schedule, on one batch, and looks at what this rank holds; called on every rank."""
    table = SCHEDULES[name](world.size, config.num_microbatches)
    splits = "W" in table.ops
    trainer = Trainer(config, world, table, stage_class=SplitStage if splits else Stage)
    pipeline = trainer.pipeline
    inputs, targets = (x.to(world.device) for x in batch(config, 0))
    rows = (inputs if pipeline.is_first else None, targets if pipeline.is_last else None)
    held = Held([*pipeline.parameters(), inputs, targets])
    for stage in pipeline.stages.values() if splits else ():
        held.watch_split(stage)
    process, iterations = psutil.Process(), []
    for _ in range(num_iterations):
        for ledger in (held.activations, held.with_gradients):
            ledger.peak = ledger.held
        with held.watching():
            trainer.optimizer.optimize(rows)
        iterations.append(Iteration(held.activations.peak, held.with_gradients.peak, process.memory_info().rss))
    message = config.batch_size // config.num_microbatches * config.width * config.torch_dtype.itemsize
    ahead = posted_ahead(pipeline.executor.row, lambda value: message)
    trainer.close()
    predicted = Simulation(table).peak_bytes(bytes_of_stages(config, table.num_stages))[world.rank]
    return Rank(iterations, predicted, ahead)


def peak_figure(ranks: Sequence[Rank], case: str) -> Figure:
    """The largest of the ranks' peaks over what the table predicts for that rank."""
    peaks = [[max(column) for column in zip(*rank.iterations, strict=True)] for rank in ranks]
    shares = [activations / rank.predicted for rank, (activations, *_) in zip(ranks, peaks, strict=True)]
    with_gradients = [both / rank.predicted for rank, (_, both, _) in zip(ranks, peaks, strict=True)]
    beside = {f"rank {index}, MiB": activations / 2**20 for index, (activations, *_) in enumerate(peaks)}
    beside["posted ahead, MiB"] = max(rank.posted_ahead for rank in ranks) / 2**20
    if with_gradients != shares:
        beside["with gradients kept for W"] = max(with_gradients)
    return Figure(
        "memory, peak of activations / in flight x a microbatch",
        case,
        max(shares),
        goal=GOAL,
        beside=beside,
        samples={f"rank {index}": [float(i.activations) for i in rank.iterations] for index, rank in enumerate(ranks)},
    )


def growth_figures(ranks: Sequence[Rank], case: str) -> list[Figure]:
    """The last iteration over number 20, the largest of the ranks: what is held at the peak, and the resident set."""
    figures = []
    for what, field in (("held at the peak", "with_gradients"), ("resident set", "resident")):
        pairs = [(getattr(rank.iterations[EARLY - 1], field), getattr(rank.iterations[-1], field)) for rank in ranks]
        figures.append(
            Figure(
                f"memory, {what}, iteration {len(ranks[0].iterations)} / {EARLY}",
                case,
                max(late / early for early, late in pairs),
                goal=FLAT,
                beside={f"rank {index} grows by, KiB": (b - a) / 2**10 for index, (a, b) in enumerate(pairs)},
            )
        )
    return figures


def main() -> None:
    """Measures one schedule after another."""
    takes = {MeasureOptions: None, MemoryOptions: None, WorldOptions: ["device", "timeout"]}
    options, chosen, world_options = parse(torchrun_command(PROGRAM, 2), __doc__, takes)
    launch, config = read_launch(PROGRAM, at_least=2), config_of(options.size)
    figures = []
    with open_world(launch, world_options) as world:
        for name in chosen.schedules:
            is_long = name in LONG
            found = run(world, config, name, chosen.num_iterations if is_long else options.rounds)
            ranks, case = world.gather_everywhere(found), f"{name}, {options.size}, P={world.size}"
            figures += [peak_figure(ranks, case), *(growth_figures(ranks, case) if is_long else [])]
    if launch.rank == 0:
        save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
