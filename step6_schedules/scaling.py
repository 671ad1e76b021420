"""python -m step6_schedules.scaling: what working through a table costs, from small tables to large ones.

For each size: microseconds an action for building, checking, lowering and simulating, and bytes an action at the peak.
"""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from step0_monolith.options import Options, one_of, option, parse, run_program, whole
from step5_orchestrator.costs import UNIT_COST
from step5_orchestrator.legality import check
from step5_orchestrator.lowering import lower
from step5_orchestrator.table import Table
from step6_schedules.schedules import SCHEDULES
from step6_schedules.simulate import Simulation

SIZES = ((4, 8), (8, 64), (16, 128), (32, 256), (64, 512), (64, 1024))
PHASES = ("build", "check", "lower", "simulate")


@dataclass(frozen=True)
class ScalingOptions(Options):
    """What is measured."""

    schedule: str = option("interleaved", one_of(*SCHEDULES), "name of the schedule")
    num_ranks: int = option(64, whole(1, 4096), "the largest number of ranks")
    num_microbatches: int = option(1024, whole(1, 100_000), "the largest number of microbatches")


def work(name: str, num_ranks: int, num_microbatches: int, lap: Callable[[str], None]) -> Table:
    """Everything that is done with a table on paper; calls `lap` after each phase."""
    table = SCHEDULES[name](num_ranks, num_microbatches)
    lap("build")
    check(table)
    lap("check")
    lower(table)
    lap("lower")
    simulation = Simulation(table, UNIT_COST)
    _ = simulation.makespan, simulation.bubble, simulation.peak_in_flight, simulation.memory()
    lap("simulate")
    return table


def seconds_of(name: str, num_ranks: int, num_microbatches: int) -> tuple[int, dict[str, float]]:
    """Actions, and seconds of each phase."""
    seconds: dict[str, float] = {}
    latest = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal latest
        now = time.perf_counter()
        seconds[phase], latest = now - latest, now

    table = work(name, num_ranks, num_microbatches, lap)
    return sum(map(len, table.rows)), seconds


def peak_bytes(name: str, num_ranks: int, num_microbatches: int) -> int:
    """Bytes at the peak, from a run of its own, since counting them takes time."""
    tracemalloc.start()
    work(name, num_ranks, num_microbatches, lambda phase: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    """Measures size by size."""
    (options,) = parse("python -m step6_schedules.scaling", __doc__, {ScalingOptions: None})
    sizes = [s for s in SIZES if s[0] <= options.num_ranks and s[1] <= options.num_microbatches]
    largest = (options.num_ranks, options.num_microbatches)
    work(options.schedule, 2, 4, lambda phase: None)  # what is imported or cached at the first use is not counted
    print(f"{options.schedule}\nranks  microbatches  actions  " + "  ".join(PHASES) + "  total  (us an action)  bytes")
    for num_ranks, num_microbatches in [*sizes, *([largest] if largest not in sizes else [])]:
        actions, seconds = seconds_of(options.schedule, num_ranks, num_microbatches)
        peak = peak_bytes(options.schedule, num_ranks, num_microbatches)
        shown = "  ".join(f"{seconds[phase] / actions * 1e6:{len(phase)}.1f}" for phase in PHASES)
        total = sum(seconds.values()) / actions * 1e6
        print(
            f"{num_ranks:5}  {num_microbatches:12}  {actions:7}  {shown}  {total:5.1f}{peak / actions:24.0f}",
            flush=True,
        )


if __name__ == "__main__":
    run_program(main)
