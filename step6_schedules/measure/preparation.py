"""python -m step6_schedules.measure.preparation: what tables cost before the first iteration, and how that grows.

Building, checking, lowering and simulating one large interleaved table; the growth of time and memory with the number
of microbatches; and beside it what torch.distributed.pipelining does in the constructor of the same schedule.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from step0_monolith.options import Options, option, parse, run_program, switch, whole
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.load import Load
from step6_schedules.measure.program import MeasureOptions, save
from step6_schedules.measure.rounds import spread
from step6_schedules.scaling import PHASES, peak_bytes, seconds_of, work

PROGRAM = "python -m step6_schedules.measure.preparation"
SCHEDULE, NUM_CHUNKS = "interleaved", 2
PREPARATION = ("build", "check", "lower")  # what the library does too; it does not simulate
ACTION_GOAL, GROWTH_GOAL = 15.0, 1.1
LONG = 512  # microbatches from which the library takes seconds, so that it runs in fewer rounds


@dataclass(frozen=True)
class PreparationOptions(Options):
    """How large the tables are. Growth and the library are measured with an eighth of the ranks."""

    num_ranks: int = option(64, whole(16, 4096), "ranks of the largest table")
    num_microbatches: int = option(
        1024, whole(32, 100_000), "microbatches of the largest table; growth is measured from an eighth to eight times"
    )
    largest_library: bool = option(False, switch, "the library's preparation of the largest table too (a minute)")


class _Clock:
    """The CPU time that this process has used since it was made, for the share of others."""

    def __init__(self) -> None:
        self._load, self._cpu = Load(), time.process_time()
        self._load.start()

    def others(self) -> float:
        return self._load.stop(time.process_time() - self._cpu)


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent k of costs ~ sizes ** k: of the straight line through the logarithms that fits best."""
    x, y = [math.log(s) for s in sizes], [math.log(c) for c in costs]
    return statistics.linear_regression(x, y).slope


def per_action(num_ranks: int, num_microbatches: int, rounds: int) -> Figure:
    """Microseconds an action of everything that is done with a table on paper."""
    clock = _Clock()
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(rounds):
        actions, seconds = seconds_of(SCHEDULE, num_ranks, num_microbatches)
        for phase in PHASES:
            found[phase].append(1e6 * seconds[phase] / actions)
    others = clock.others()
    return Figure(
        "tables, built, checked, lowered, simulated",
        _case(num_ranks, num_microbatches),
        unit="us an action",
        **of_spread(spread([sum(parts) for parts in zip(*found.values(), strict=True)])),
        goal=ACTION_GOAL,
        others=others,
        beside={
            **{f"{phase}, us": statistics.median(values) for phase, values in found.items()},
            "actions": actions,
            "bytes an action": peak_bytes(SCHEDULE, num_ranks, num_microbatches) / actions,
        },
        samples=found,
    )


def growth(num_ranks: int, numbers: Sequence[int], rounds: int) -> list[Figure]:
    """The exponents of time and of memory as functions of the number of microbatches. numbers: of these."""
    clock = _Clock()
    # For each round the seconds of each size: sizes take turns, so that a disturbance does not hit one alone.
    seconds = [[sum(seconds_of(SCHEDULE, num_ranks, m)[1].values()) for m in numbers] for _ in range(rounds)]
    others = clock.others()
    peaks = [peak_bytes(SCHEDULE, num_ranks, m) for m in numbers]
    case = f"{_case(num_ranks, numbers[0])} to {numbers[-1]}"
    medians = [statistics.median(turns) for turns in zip(*seconds, strict=True)]
    return [
        Figure(
            "growth of time with microbatches",
            case,
            unit="log-log slope",
            **of_spread(spread([slope(numbers, row) for row in seconds])),
            goal=GROWTH_GOAL,
            others=others,
            beside={f"M={m}, ms": 1e3 * value for m, value in zip(numbers, medians, strict=True)},
            samples={f"M={m}, ms": [1e3 * row[i] for row in seconds] for i, m in enumerate(numbers)},
        ),
        Figure(
            "growth of memory with microbatches",
            case,
            slope(numbers, peaks),
            unit="log-log slope",
            goal=GROWTH_GOAL,
            beside={f"M={m}, MB": value / 1e6 for m, value in zip(numbers, peaks, strict=True)},
        ),
    ]


def library_seconds(num_ranks: int, num_microbatches: int) -> float:
    """Seconds of the library's constructor on one rank: it draws all rows, checks them and adds the messages."""
    # All that it looks at; a stage with a model would also be built.
    stages = [
        SimpleNamespace(num_stages=num_ranks * NUM_CHUNKS, group_size=num_ranks, group_rank=0, submod=None)
        for _ in range(NUM_CHUNKS)
    ]
    start = time.perf_counter()
    ScheduleInterleaved1F1B(stages, num_microbatches)
    return time.perf_counter() - start


def against_library(num_ranks: int, num_microbatches: int, rounds: int) -> Figure:
    """Our building, checking and lowering over the library's preparation of the same schedule, in turn."""
    clock = _Clock()
    ours, theirs = [], []
    for _ in range(rounds):
        seconds = seconds_of(SCHEDULE, num_ranks, num_microbatches)[1]
        ours.append(sum(seconds[phase] for phase in PREPARATION))
        theirs.append(library_seconds(num_ranks, num_microbatches))
    return Figure(
        "preparation, ours / library",
        _case(num_ranks, num_microbatches),
        **of_spread(spread([a / b for a, b in zip(ours, theirs, strict=True)])),
        others=clock.others(),
        beside={"ours, s": statistics.median(ours), "library, s": statistics.median(theirs)},
        samples={"ours": ours, "library": theirs},
    )


def _case(num_ranks: int, num_microbatches: int) -> str:
    return f"{SCHEDULE}, V={NUM_CHUNKS}, P={num_ranks}, M={num_microbatches}"


def measure(options: PreparationOptions, rounds: int) -> list[Figure]:
    """All figures."""
    work(SCHEDULE, 2, 4, lambda phase: None)  # what is imported or cached at the first use is not counted
    largest, few = (options.num_ranks, options.num_microbatches), options.num_ranks // 8
    numbers = [int(largest[1] * factor) for factor in (1 / 8, 1 / 2, 2, 8)]
    sizes = [(few, largest[1] // 4), (few, largest[1]), *([largest] if options.largest_library else [])]
    return [
        per_action(*largest, rounds),
        *growth(few, numbers, rounds),
        *(against_library(*size, rounds if size[1] < LONG else max(1, rounds // 3)) for size in sizes),
    ]


def main() -> None:
    """Measures."""
    takes = {MeasureOptions: ["rounds", "json"], PreparationOptions: None}
    options, chosen = parse(PROGRAM, __doc__, takes)
    save(measure(chosen, options.rounds), options.json)


if __name__ == "__main__":
    run_program(main)
