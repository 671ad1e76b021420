"""torchrun --standalone --nproc-per-node 4 -m step6_schedules.measure.emulated: emulated devices against the table.

On any number of ranks: each schedule's iterations with every action stretched to F=10, B=20 ms (half of each for a
chunk where a rank has two), from the first start to the last end over all ranks, against what the table says.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from step0_monolith.config import Config
from step0_monolith.options import Options, UsageError, option, parse, run_program, whole
from step1_partition.stage import Stage
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step5_orchestrator.costs import Cost, costs
from step5_orchestrator.prediction import makespan
from step5_orchestrator.table import Table, TableError
from step5_orchestrator.trainer import Trainer
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.load import Load
from step6_schedules.measure.program import MeasureOptions, chosen_from, save
from step6_schedules.measure.rounds import meet, spread
from step6_schedules.schedules import SCHEDULES
from step6_schedules.split_backward import SplitStage

PROGRAM = "step6_schedules.measure.emulated"
F, B = 10.0, 20.0  # milliseconds, of a rank's whole share of the layers
WIDTH, NUM_LAYERS, ROWS = 128, 16, 4
WARM_UP = 1
GOALS = {1: 1.03, 2: 1.06}  # by the chunks a rank


def _numbers(flag: str, value: object) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(whole(1, 10_000)(flag, part) for part in parts)


@dataclass(frozen=True)
class EmulatedOptions(Options):
    """What runs."""

    schedules: tuple[str, ...] = option(tuple(SCHEDULES), chosen_from(SCHEDULES), "schedules to measure")
    num_microbatches: tuple[int, ...] = option((8, 16), _numbers, "microbatches, such as 8,16")


def cost_of(num_chunks: int) -> Cost:
    """What an action of one of a rank's chunks takes, in milliseconds."""
    return costs(F / num_chunks, B / num_chunks)


def runnable(
    names: Iterable[str], num_ranks: int, numbers: Iterable[int]
) -> tuple[list[tuple[Table, Cost]], list[tuple[str, str]]]:
    """The tables of that many ranks, one a schedule and number of microbatches, with their costs; and those that there
    are none of, each with the reason.
    """
    tables, missing = [], []
    for num_microbatches in numbers:
        for name in names:
            schedule = SCHEDULES[name]
            cost = cost_of(schedule.default_chunks)
            try:
                tables.append((schedule.table(num_ranks, num_microbatches, cost=cost), cost))
            except TableError as error:
                missing.append((f"{name}, P={num_ranks}, M={num_microbatches}", str(error)))
    return tables, missing


def span_ratios(spans: Sequence[Sequence[tuple[float, float]]], predicted: float) -> list[float]:
    """Each iteration's length over the predicted one. spans: for each rank and iteration its first start and its last
    end, in seconds of clocks that agree; predicted: in milliseconds.
    """
    lengths = [max(end for _, end in ranks) - min(start for start, _ in ranks) for ranks in zip(*spans, strict=True)]
    return [1e3 * length / predicted for length in lengths]


def measure(world: World, table: Table, cost: Cost, rounds: int) -> Figure:
    """The figure of one table, on every rank."""
    num_chunks = table.num_stages // world.size
    config = Config(
        num_layers=NUM_LAYERS,
        width=WIDTH,
        batch_size=ROWS * table.num_microbatches,
        num_microbatches=table.num_microbatches,
        data="random",
        learning_rate=1e-4,
    )
    trainer = Trainer(config, world, table, emulate=cost, stage_class=SplitStage if "W" in table.ops else Stage)
    spans: list[tuple[float, float]] = []
    load = Load()
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            meet(world)
            load.start()
            cpu = time.process_time()
        trainer.step()
        events = trainer.pipeline.executor.events
        spans.append((events[0].start, events[-1].end))
    cpu = world.sum(torch.tensor([time.process_time() - cpu], dtype=torch.float64)).item()
    others = load.stop(cpu)
    trainer.close()
    predicted = makespan(table, cost)
    ratios = span_ratios(world.gather_everywhere(spans[WARM_UP:]), predicted)
    return Figure(
        "emulated devices, makespan / table's",
        f"{table.name}, P={world.size}, M={table.num_microbatches}",
        **of_spread(spread(ratios)),
        goal=GOALS.get(num_chunks),
        others=others,
        beside={"table's, ms": predicted, "measured, ms": predicted * statistics.median(ratios)},
        samples={"makespan, ms": [predicted * ratio for ratio in ratios]},
    )


def main() -> None:
    """Measures one table after another."""
    takes = {MeasureOptions: ["rounds", "json"], EmulatedOptions: None, WorldOptions: ["device", "timeout"]}
    options, chosen, world_options = parse(torchrun_command(PROGRAM), __doc__, takes)
    launch = read_launch(PROGRAM, at_least=2, at_most=NUM_LAYERS // 2)
    tables, missing = runnable(chosen.schedules, launch.size, chosen.num_microbatches)
    if not tables:
        raise UsageError(f"--schedules: nothing to measure; {missing[0][1]}" if missing else "--schedules: none given")
    with open_world(launch, world_options) as world:
        figures = [measure(world, table, cost, options.rounds) for table, cost in tables]
    if launch.rank == 0:
        for case, reason in missing:
            print(f"left out: {case}: {reason}", flush=True)
        save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
