"""torchrun --standalone --nproc-per-node 4 -m step6_schedules.measure.wins_devices: P devices against one.

Emulated devices: a rank's F takes 10 ms and its B 20 ms at least. One device does the work of all, alone: the same
microbatches, each P times as long, or the whole batch at once, as long as all microbatches together.
"""

from functools import partial

import torch.distributed as dist

from step0_monolith.config import Config
from step0_monolith.options import parse, run_program
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step5_orchestrator.costs import Cost, costs
from step6_schedules.measure.contestants import Ours, on_rank_0
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.program import MeasureOptions, save
from step6_schedules.measure.rounds import others, ratio, take_turns
from step6_schedules.schedules import SCHEDULES

PROGRAM = "step6_schedules.measure.wins_devices"
F, B = 10.0, 20.0  # milliseconds, of a rank's share of the layers and one microbatch
NUM_MICROBATCHES, ROWS, WIDTH = 8, 4, 64
PIPELINE, ONE, ONE_FULL = "P devices", "one device", "one device, full batch"


def ideal(num_ranks: int, num_microbatches: int) -> float:
    """The speed-up that the table of 1F1B promises: P·M·(F+B) against (M+P-1)·(F+B)."""
    return num_ranks * num_microbatches / (num_microbatches + num_ranks - 1)


def config_of(num_layers: int, num_microbatches: int) -> Config:
    """A model so small that its own arithmetic takes no part in the times."""
    return Config(
        num_layers=num_layers,
        width=WIDTH,
        batch_size=ROWS * NUM_MICROBATCHES,
        num_microbatches=num_microbatches,
        data="random",
        learning_rate=1e-4,
    )


def single_cost(num_ranks: int, num_microbatches: int) -> Cost:
    """What the actions of one device take that has all layers, with the batch in so many microbatches."""
    longer = num_ranks * NUM_MICROBATCHES / num_microbatches
    return costs(F * longer, B * longer)


def single(world: World, num_ranks: int, num_microbatches: int) -> Ours:
    """One device; world: of one rank."""
    table = SCHEDULES["1f1b"](1, num_microbatches)
    config, cost = config_of(num_ranks, num_microbatches), single_cost(num_ranks, num_microbatches)
    return Ours(config, world, table, emulate=cost)


def alone(world: World) -> World:
    """A world of this rank only; called on every rank."""
    parts = [[rank] for rank in range(world.size)]
    groups = [dist.new_group(part, timeout=world.timeout) for part in parts]
    return world.part(parts, groups[world.rank])


def measure(world: World, rounds: int) -> Figure:
    """The speed-up of the ranks over one device, on every rank."""
    table, one = SCHEDULES["1f1b"](world.size, NUM_MICROBATCHES), alone(world)
    pipeline = Ours(config_of(world.size, NUM_MICROBATCHES), world, table, emulate=costs(F, B))
    contestants = {
        PIPELINE: pipeline,
        ONE: on_rank_0(world, partial(single, one, world.size, NUM_MICROBATCHES)),
        ONE_FULL: on_rank_0(world, partial(single, one, world.size, 1)),
    }
    samples = take_turns(world, contestants, rounds=rounds, turn_seconds=0.01)
    pipeline.close()
    return Figure(
        "where the pipeline wins, speed-up over one emulated device",
        f"1f1b, P={world.size}, M={NUM_MICROBATCHES}",
        **of_spread(ratio(samples, ONE, PIPELINE)),
        others=others(samples),
        beside={
            "PM/(M+P-1)": ideal(world.size, NUM_MICROBATCHES),
            "over one with the full batch": ratio(samples, ONE_FULL, PIPELINE).median,
        },
        samples={f"{name}, ms": [1e3 * sample.seconds for sample in turns] for name, turns in samples.items()},
    )


def main() -> None:
    """Measures one number of ranks."""
    takes = {MeasureOptions: ["rounds", "json"], WorldOptions: ["timeout"]}
    options, world_options = parse(torchrun_command(PROGRAM), __doc__, takes)
    launch = read_launch(PROGRAM, at_least=2)
    with open_world(launch, world_options) as world:
        figure = measure(world, options.rounds)
    if launch.rank == 0:
        save([figure], options.json)


if __name__ == "__main__":
    run_program(main)
