"""torchrun --standalone --nproc-per-node 2 -m step6_schedules.measure.iterations: whole iterations, side by side.

For each schedule of torch.distributed.pipelining, in turn: this course, that library, and the monolith, on the same
weights, batch, microbatches and table. Wall time, and CPU seconds of all ranks together.
"""

import statistics
from dataclasses import dataclass

from step0_monolith.config import Config
from step0_monolith.options import Options, option, optional, parse, run_program
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step6_schedules.measure.by_hand import ByHand
from step6_schedules.measure.contestants import LIBRARY, Library, Monolith, Ours, on_rank_0
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.program import MeasureOptions, chosen_from, config_of, save
from step6_schedules.measure.rounds import Samples, others, ratio, take_turns

PROGRAM = "step6_schedules.measure.iterations"
OURS, LIBRARYS, CHECKED, MONOLITH = "ours", "library", "ours with checks", "monolith"
BY_HAND, FULL_1, FULL_2 = "by hand", "full batch, 1 thread", "full batch, 2 threads"
# A monolith on every rank at once: what processes that share memory and caches take from each other.
SIDE_BY_SIDE = "monoliths side by side"


@dataclass(frozen=True)
class IterationOptions(Options):
    """What runs."""

    schedules: tuple[str, ...] | None = option(
        None,
        optional(chosen_from(LIBRARY)),
        "schedules to measure, such as gpipe,1f1b (default: all that the library has)",
    )


def time_goal(size: str, name: str) -> float:
    """Our time over the library's, at most."""
    if size == "large" and name in ("gpipe", "1f1b"):
        return 1.0  # there the library is within 5 % of what the arithmetic alone takes
    return 0.67 if size == "tiny" else 0.95


def work_goal(size: str, name: str) -> float | None:
    """CPU seconds of all ranks over the monolith's, at most."""
    return {"1f1b": 1.4, "interleaved": 2.0, "zero-bubble": 2.5}.get(name) if size == "tiny" else 1.06


def measure(world: World, config: Config, name: str, size: str, rounds: int) -> list[Figure]:
    """The figures of one schedule, on every rank."""
    library = Library(name, config, world)
    table = library.table(name, world.size, config.num_microbatches)
    ours = Ours(config, world, table)
    contestants = {
        OURS: ours,
        LIBRARYS: library,
        MONOLITH: on_rank_0(world, lambda: Monolith(config)),
        SIDE_BY_SIDE: Monolith(config),
        CHECKED: ours.with_checks,
    }
    by_hand = None
    if "W" not in table.ops:
        contestants[BY_HAND] = by_hand = ByHand(config, world, table)
    if name == "1f1b":
        contestants[FULL_1] = on_rank_0(world, lambda: Monolith(config, 1))
        contestants[FULL_2] = on_rank_0(world, lambda: Monolith(config, 1, threads=2))
    samples = take_turns(world, contestants, rounds=rounds)
    ours.close()
    if by_hand is not None:
        by_hand.close()
    return [
        _time(samples, name, size),
        _work(samples, name, size, world.size),
        *([_speed_up(samples, config, size)] if name == "1f1b" else []),
    ]


def _milliseconds(samples: Samples) -> dict[str, list[float]]:
    return {name: [1e3 * sample.seconds for sample in turns] for name, turns in samples.items()}


def _cpu_milliseconds(samples: Samples) -> dict[str, list[float]]:
    return {name: [1e3 * sample.cpu_seconds for sample in turns] for name, turns in samples.items()}


def _time(samples: Samples, name: str, size: str) -> Figure:
    beside = {f"{who}, ms": statistics.median(turns) for who, turns in _milliseconds(samples).items()}
    beside["with checks / library"] = ratio(samples, CHECKED, LIBRARYS).median
    if BY_HAND in samples:
        beside["by hand / library"] = ratio(samples, BY_HAND, LIBRARYS).median
    return Figure(
        "iteration time, ours / library",
        f"{name}, {size}",
        **of_spread(ratio(samples, OURS, LIBRARYS)),
        goal=time_goal(size, name),
        others=others(samples),
        beside=beside,
        samples=_milliseconds(samples),
    )


def _work(samples: Samples, name: str, size: str, num_ranks: int) -> Figure:
    beside = {
        who: ratio(samples, who, MONOLITH, "cpu_seconds").median
        for who in (LIBRARYS, CHECKED, BY_HAND, SIDE_BY_SIDE)
        if who in samples
    }
    beside[SIDE_BY_SIDE] /= num_ranks  # each of them does the whole work
    return Figure(
        "CPU seconds of all ranks / monolith",
        f"{name}, {size}",
        **of_spread(ratio(samples, OURS, MONOLITH, "cpu_seconds")),
        goal=work_goal(size, name),
        others=others(samples),
        beside=beside,
        samples=_cpu_milliseconds(samples),
    )


def _speed_up(samples: Samples, config: Config, size: str) -> Figure:
    """Against the monolith with the same microbatches, as a share of the ideal 2M/(M+1)."""
    num_microbatches = config.num_microbatches
    ideal = 2 * num_microbatches / (num_microbatches + 1)
    found = ratio(samples, MONOLITH, OURS)
    return Figure(
        "speed-up over the monolith, of the ideal",
        f"1f1b, {size}",
        value=found.median / ideal,
        spread=(found.low / ideal, found.high / ideal),
        goal=0.9 if size == "large" else None,
        at_most=False,
        others=others(samples),
        beside={
            "speed-up": found.median,
            "ideal": ideal,
            "the library's": ratio(samples, MONOLITH, LIBRARYS).median,
            "over the full batch, 1 thread": ratio(samples, FULL_1, OURS).median,
            "over the full batch, 2 threads": ratio(samples, FULL_2, OURS).median,
        },
        samples=_milliseconds(samples),
    )


def main() -> None:
    """Measures one schedule after another."""
    takes = {MeasureOptions: None, IterationOptions: None, WorldOptions: ["device", "timeout"]}
    options, chosen, world_options = parse(torchrun_command(PROGRAM, 2), __doc__, takes)
    launch, config = read_launch(PROGRAM, at_least=2, at_most=2), config_of(options.size)
    figures: list[Figure] = []
    with open_world(launch, world_options) as world:
        for name in chosen.schedules or LIBRARY:
            figures += measure(world, config, name, options.size, options.rounds)
    if launch.rank == 0:
        save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
