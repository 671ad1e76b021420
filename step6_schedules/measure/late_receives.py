"""torchrun --standalone --nproc-per-node 2 -m step6_schedules.measure.late_receives: what posting late costs.

The same iteration twice: with as many receives posted ahead as 1 MiB a peer allows, as in training, and with each
posted one action before it is needed and no earlier. Weights, batch, table, messages and bits are the same.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from step0_monolith.options import Options, option, parse, run_program
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step5_orchestrator.executor import ROOM
from step6_schedules.measure.contestants import Ours
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.program import MeasureOptions, chosen_from, config_of, save
from step6_schedules.measure.rounds import others, ratio, take_turns
from step6_schedules.schedules import SCHEDULES

PROGRAM = "step6_schedules.measure.late_receives"
AHEAD, LATE = "ahead", "late"


@dataclass(frozen=True)
class LateOptions(Options):
    """What runs."""

    schedules: tuple[str, ...] = option(
        ("gpipe", "1f1b", "interleaved"), chosen_from(["gpipe", "1f1b", "interleaved"]), "schedules to measure"
    )


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Pipelines that are opened inside post no receive further ahead than one action."""
    before = dict(ROOM)
    ROOM.update(dict.fromkeys(ROOM, 0))
    try:
        yield
    finally:
        ROOM.update(before)


def measure(world: World, size: str, name: str, rounds: int) -> Figure:
    """One schedule, on every rank."""
    config = config_of(size)
    table = SCHEDULES[name].table(world.size, config.num_microbatches)
    with no_room():
        late = Ours(config, world, table)
    contestants = {AHEAD: Ours(config, world, table), LATE: late}
    samples = take_turns(world, contestants, rounds=rounds)
    for contestant in contestants.values():
        contestant.close()
    return Figure(
        "receives posted late / ahead",
        f"{name}, {size}",
        **of_spread(ratio(samples, LATE, AHEAD)),
        others=others(samples),
        beside={"CPU seconds, late / ahead": ratio(samples, LATE, AHEAD, "cpu_seconds").median},
        samples={f"{who}, ms": [1e3 * sample.seconds for sample in turns] for who, turns in samples.items()},
    )


def main() -> None:
    """Measures one schedule after another."""
    takes = {MeasureOptions: None, LateOptions: None, WorldOptions: ["timeout"]}
    options, chosen, world_options = parse(torchrun_command(PROGRAM, 2), __doc__, takes)
    launch = read_launch(PROGRAM, at_least=2, at_most=4)
    with open_world(launch, world_options) as world:
        figures = [measure(world, options.size, name, options.rounds) for name in chosen.schedules]
    if launch.rank == 0:
        save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
