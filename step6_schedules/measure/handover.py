"""torchrun --standalone --nproc-per-node 2 -m step6_schedules.measure.handover: what handing a value over takes.

From the end of the action that makes a value to the start of the one that waits for it on the other rank: this course,
the same table by hand with bare isend and irecv, torch.distributed.pipelining, and a bare hop of as many bytes.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from step0_monolith.config import Config
from step0_monolith.options import Options, option, parse, run_program
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step5_orchestrator.actions import Action, makes, needs
from step5_orchestrator.executor import Event
from step6_schedules.measure.by_hand import ByHand
from step6_schedules.measure.contestants import Library, Ours
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.load import Load
from step6_schedules.measure.program import MeasureOptions, chosen_from, config_of, save
from step6_schedules.measure.rounds import meet, spread

PROGRAM = "step6_schedules.measure.handover"
OURS, BY_HAND, LIBRARYS, HOP = "ours", "by hand", "library", "bare hop"
NAMES = ("gpipe", "1f1b", "interleaved")
ITERATIONS = 20  # in each turn
GOAL = 1.5

Run = Callable[[], Sequence[Event]]


@dataclass(frozen=True)
class HandoverOptions(Options):
    """What runs."""

    schedules: tuple[str, ...] = option(NAMES, chosen_from(NAMES), "schedules to measure")


def gaps(rows: Sequence[Sequence[Event]]) -> list[float]:
    """Seconds between the end of a making action and the start of the taking one, of one iteration's events.

    rows: each rank's events in its order, on clocks that agree. Counted is a value that crosses ranks and whose taker
    was idle already: the action before it had ended when the maker's did. So the first action of a rank is left out:
    nothing says what the rank did before.
    """
    made = {value: (rank, event.end) for rank, row in enumerate(rows) for event in row for value in makes(event.action)}
    found = []
    for rank, row in enumerate(rows):
        for before, event in itertools.pairwise(row):
            for value in needs(event.action):
                maker, end = made.get(value, (rank, 0.0))
                if maker != rank and before.end <= end:
                    found.append(event.start - end)
    return found


class Noted(PipelineStage):
    """The library's stage, which notes when its actions start and end: in `log`, which all stages of a rank share."""

    log: ClassVar[list[Event]] = []

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        """A forward, as the library calls it."""
        return self._noted("F", fwd_chunk_id, super().forward_one_chunk, args, kwargs)

    def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        """A backward, as the library calls it."""
        return self._noted("B", bwd_chunk_id, super().backward_one_chunk, args, kwargs)

    def _noted(self, op: str, microbatch: int, run: Callable, args: tuple, kwargs: dict):
        start = time.perf_counter()
        result = run(microbatch, *args, **kwargs)
        self.log.append(Event(Action(self.stage_index, op, microbatch), start, time.perf_counter()))
        return result


def hop_seconds(world: World, num_bytes: int) -> float:
    """Half of a bare round trip between two ranks whose receives are posted before the sends."""
    there, back = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    peer, times = 1 - world.rank, []
    for _ in range(50):
        coming = dist.irecv(back, peer, tag=1)
        meet(world)
        start = time.perf_counter()
        if world.rank == 1:
            coming.wait()
        leaving = dist.isend(there, peer, tag=1)
        if world.rank == 0:
            coming.wait()
        times.append((time.perf_counter() - start) / 2)
        leaving.wait()
    # Rank 1's clock starts anywhere between: only rank 0 sees the whole way.
    return world.broadcast(torch.tensor(times, dtype=torch.float64), 0).median().item()


def contestants(world: World, config: Config, name: str) -> tuple[dict[str, Run], Callable[[], None]]:
    """What runs an iteration and returns its events on this rank, by name; and what closes them all."""
    library = Library(name, config, world, Noted)
    table = library.table(name, world.size, config.num_microbatches)
    ours, by_hand = Ours(config, world, table), ByHand(config, world, table, with_events=True)

    def run_ours() -> Sequence[Event]:
        ours()
        return ours.trainer.pipeline.executor.events

    def run_by_hand() -> Sequence[Event]:
        by_hand()
        return by_hand.events

    def run_library() -> Sequence[Event]:
        Noted.log.clear()
        library()
        return list(Noted.log)

    def close() -> None:
        ours.close()
        by_hand.close()

    return {OURS: run_ours, BY_HAND: run_by_hand, LIBRARYS: run_library}, close


def measure(world: World, config: Config, name: str, size: str, rounds: int) -> Figure:
    """The figure of one schedule, on every rank: medians of each turn, in turns as in `take_turns`."""
    runs, close = contestants(world, config, name)
    num_bytes = config.batch_size // config.num_microbatches * config.width * config.torch_dtype.itemsize
    found: dict[str, list[float]] = {who: [] for who in (*runs, HOP)}
    load, loads = Load(), []
    for number in range(rounds + 1):
        load.start()
        cpu = time.process_time()
        hop = hop_seconds(world, num_bytes)
        medians = {HOP: hop}
        for who in list(runs)[:: -1 if number % 2 else 1]:
            kept = []
            for _ in range(ITERATIONS):
                meet(world)
                kept.append(runs[who]())
            # Exchanged after the turn: in an iteration that would change what is measured.
            iterations = zip(*world.gather_everywhere(kept), strict=True)
            medians[who] = statistics.median(gap for rows in iterations for gap in gaps(rows))
        cpu = world.sum(torch.tensor([time.process_time() - cpu], dtype=torch.float64)).item()
        if number:  # the first round warms up
            loads.append(load.stop(cpu))
            for who, median in medians.items():
                found[who].append(1e6 * median)
    close()
    return figure(found, statistics.median(loads), f"{name}, {size}")


def figure(micros: dict[str, list[float]], others: float, case: str) -> Figure:
    """micros: for each contestant its median gap of each round, in microseconds."""
    medians = {who: statistics.median(values) for who, values in micros.items()}
    beside = {f"{who}, us": median for who, median in medians.items()}
    beside["library / by hand"] = spread(_ratios(micros, LIBRARYS)).median
    return Figure(
        "hand-over per action, ours / by hand",
        case,
        **of_spread(spread(_ratios(micros, OURS))),
        goal=GOAL,
        others=others,
        beside=beside,
        samples=micros,
    )


def _ratios(micros: dict[str, list[float]], who: str) -> list[float]:
    return [a / b for a, b in zip(micros[who], micros[BY_HAND], strict=True)]


def main() -> None:
    """Measures one schedule after another."""
    takes = {MeasureOptions: None, HandoverOptions: None, WorldOptions: ["device", "timeout"]}
    options, chosen, world_options = parse(torchrun_command(PROGRAM, 2), __doc__, takes)
    launch, config = read_launch(PROGRAM, at_least=2, at_most=2), config_of(options.size)
    with open_world(launch, world_options) as world:
        figures = [measure(world, config, name, options.size, options.rounds) for name in chosen.schedules]
    if launch.rank == 0:
        save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
