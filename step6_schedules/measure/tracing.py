"""torchrun --standalone --nproc-per-node 2 -m step6_schedules.measure.tracing: what recording a trace adds.

Three trainers of the same run take turns: one records its messages for a trace, two do not. The second of these says
how much two equal ones differ here. A trainer that records nothing makes the same calls as one that never could.
"""

import statistics
from dataclasses import dataclass

from step0_monolith.options import Options, option, parse, run_program
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step6_schedules.measure.contestants import Ours
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.program import MeasureOptions, chosen_from, config_of, save
from step6_schedules.measure.rounds import others, ratio, take_turns
from step6_schedules.schedules import SCHEDULES
from step6_schedules.trace import Tracing

PROGRAM = "step6_schedules.measure.tracing"
ON, OFF, TWIN = "recording", "not recording", "not recording, another"
NAMES = ("1f1b", "zb-v")
GOAL = 1.03
TURNS = 4  # as many as other programs take, times this: differences of a percent show in many turns


@dataclass(frozen=True)
class TracingOptions(Options):
    """What runs."""

    schedules: tuple[str, ...] = option(NAMES, chosen_from(SCHEDULES), "schedules to measure")


def measure(world: World, name: str, size: str, rounds: int) -> Figure:
    """The figure of one schedule, on every rank."""
    config = config_of(size)
    table = SCHEDULES[name](world.size, config.num_microbatches)
    trainers = {who: Ours(config, world, table) for who in (ON, OFF, TWIN)}
    Tracing(trainers[ON].trainer)
    samples = take_turns(world, {who: ours.with_checks for who, ours in trainers.items()}, rounds=rounds * TURNS)
    for ours in trainers.values():
        ours.close()
    milliseconds = {who: [1e3 * sample.seconds for sample in turns] for who, turns in samples.items()}
    beside = {f"{who}, ms": statistics.median(turns) for who, turns in milliseconds.items()}
    beside["two that do not record"] = ratio(samples, TWIN, OFF).median
    return Figure(
        "iteration with a trace / without",
        f"{name}, {size}",
        **of_spread(ratio(samples, ON, OFF)),
        goal=GOAL,
        others=others(samples),
        beside=beside,
        samples=milliseconds,
    )


def main() -> None:
    """Measures one schedule after another."""
    takes = {MeasureOptions: None, TracingOptions: None, WorldOptions: ["device", "timeout"]}
    options, chosen, world_options = parse(torchrun_command(PROGRAM, 2), __doc__, takes)
    launch = read_launch(PROGRAM, at_least=2)
    with open_world(launch, world_options) as world:
        figures = [measure(world, name, options.size, options.rounds) for name in chosen.schedules]
        if world.rank == 0:
            save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
