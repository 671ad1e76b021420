"""Rounds in which all contestants take turns, so that whatever disturbs the machine disturbs them alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from step2_comms.world import World
from step6_schedules.measure.load import Load


class Sample(NamedTuple):
    """One contestant's turn of one round, an iteration: wall seconds until the last rank is done, CPU seconds of all
    ranks together; and the share of all cores that others used meanwhile.
    """

    seconds: float
    cpu_seconds: float
    others: float


Samples = dict[str, list[Sample]]


def take_turns(
    world: World,
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    turn_seconds: float = 0.25,
) -> Samples:
    """Each contestant's samples, one a round, on every rank; called on every rank.

    contestants: by name, what runs one iteration; on a rank that has no part in one it returns at once. Each runs often
    enough for a turn to last `turn_seconds`. The order is turned round from round to round, and a first round warms up.
    """
    counts = {name: _repetitions(world, iterate, turn_seconds) for name, iterate in contestants.items()}
    found: Samples = {name: [] for name in contestants}
    load = Load()
    for number in range(rounds + 1):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            iterate, count = contestants[name], counts[name]
            meet(world)
            load.start()
            cpu, start = time.process_time(), time.perf_counter()
            for _ in range(count):
                iterate()
            cpu = time.process_time() - cpu
            meet(world)
            seconds = time.perf_counter() - start
            all_cpu = world.sum(torch.tensor([cpu], dtype=torch.float64)).item()
            if number:
                found[name].append(Sample(seconds / count, all_cpu / count, load.stop(all_cpu)))
    return found


def meet(world: World) -> None:
    """Returns when all ranks are here."""
    world.sum(torch.zeros(1))


def _repetitions(world: World, iterate: Callable[[], object], turn_seconds: float) -> int:
    iterate()
    meet(world)
    start = time.perf_counter()
    iterate()
    meet(world)
    count = math.ceil(turn_seconds / (time.perf_counter() - start))
    return int(world.sum(torch.tensor([count if world.rank == 0 else 0])).item())


class Spread(NamedTuple):
    """A median with its quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


def ratio(samples: Samples, one: str, other: str, what: str = "seconds") -> Spread:
    """Of one contestant to another, round by round."""
    pairs = zip(samples[one], samples[other], strict=True)
    return spread([getattr(a, what) / getattr(b, what) for a, b in pairs])


def others(samples: Samples) -> float:
    """The median share of all cores that others used."""
    return statistics.median(sample.others for turns in samples.values() for sample in turns)
