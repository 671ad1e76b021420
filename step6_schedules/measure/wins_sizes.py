"""torchrun --standalone --nproc-per-node 2 -m step6_schedules.measure.wins_sizes: two ranks against two threads.

The same two cores: a pipeline of 2 ranks with one thread each, and one process with two threads, which may cut the
batch into any of several numbers of microbatches. From narrow layers with large batches to wide ones.
"""

import statistics
from functools import partial

from step0_monolith.config import Config
from step0_monolith.options import parse, run_program
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step6_schedules.measure.contestants import Monolith, Ours, on_rank_0
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.program import MeasureOptions, save
from step6_schedules.measure.rounds import Samples, others, ratio, take_turns
from step6_schedules.schedules import SCHEDULES

PROGRAM = "step6_schedules.measure.wins_sizes"
# width, layers, rows of a batch, microbatches: of layers so narrow that moving the batch through memory takes longer
# than multiplying it, to layers so wide that the products are nearly all.
GRID = ((64, 32, 65536, 32), (128, 32, 16384, 32), (256, 16, 8192, 32), (512, 16, 2048, 16))
NUMBERS = (1, 4, 16)  # of microbatches of the monolith with two threads, beside the pipeline's own
TURN_SECONDS = 0.1
PIPELINE, ONE_THREAD = "2 ranks", "1 thread"


def config_of(size: tuple[int, int, int, int]) -> Config:
    """The run of a size."""
    width, num_layers, batch_size, num_microbatches = size
    return Config(
        num_layers=num_layers,
        width=width,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        data="random",
        learning_rate=1e-4,
    )


def two_threads(num_microbatches: int) -> str:
    """What the monolith with two threads and so many microbatches is called."""
    return f"2 threads, M={num_microbatches}"


def measure(world: World, size: tuple[int, int, int, int], rounds: int) -> Figure:
    """The times of one size, on every rank."""
    config = config_of(size)
    own = config.num_microbatches
    pipeline = Ours(config, world, SCHEDULES["1f1b"](world.size, own))
    contestants = {PIPELINE: pipeline, ONE_THREAD: on_rank_0(world, partial(Monolith, config))}
    for number in sorted({*NUMBERS, own}):
        contestants[two_threads(number)] = on_rank_0(world, partial(Monolith, config, number, threads=2))
    samples = take_turns(world, contestants, rounds=rounds, turn_seconds=TURN_SECONDS)
    pipeline.close()
    return figure_of(samples, size)


def figure_of(samples: Samples, size: tuple[int, int, int, int]) -> Figure:
    """How much faster the pipeline is than the full batch with two threads; and than the best number of microbatches,
    which nobody knows beforehand.
    """
    width, num_layers, batch_size, own = size
    medians = {name: statistics.median(sample.seconds for sample in turns) for name, turns in samples.items()}
    best = min((two_threads(number) for number in {*NUMBERS, own}), key=medians.__getitem__)
    return Figure(
        "where the pipeline wins, 2 ranks against 2 threads with the full batch",
        f"1f1b, width {width}, {num_layers} layers, {batch_size} rows, M={own}",
        **of_spread(ratio(samples, two_threads(1), PIPELINE)),
        others=others(samples),
        beside={
            "over the best M, 2 threads": ratio(samples, best, PIPELINE).median,
            "over the same M, 2 threads": ratio(samples, two_threads(own), PIPELINE).median,
            "over the same M, 1 thread": ratio(samples, ONE_THREAD, PIPELINE).median,
            "best M": float(best.rpartition("=")[2]),
            "2 ranks, ms": 1e3 * medians[PIPELINE],
        },
        samples={f"{name}, ms": [1e3 * sample.seconds for sample in turns] for name, turns in samples.items()},
    )


def main() -> None:
    """Measures one size after another."""
    takes = {MeasureOptions: ["rounds", "json"], WorldOptions: ["timeout"]}
    options, world_options = parse(torchrun_command(PROGRAM, 2), __doc__, takes)
    launch = read_launch(PROGRAM, at_least=2, at_most=2)
    with open_world(launch, world_options) as world:
        figures = [measure(world, size, options.rounds) for size in GRID]
    if launch.rank == 0:
        save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
