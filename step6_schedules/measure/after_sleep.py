"""python -m step6_schedules.measure.after_sleep: the same arithmetic, at once and after a short sleep.

A stage of 8 small layers runs one microbatch forward and backward, again and again: without a break, and with a sleep
before each. Asleep, a process leaves its core to others, and what the core had learnt of it (the contents of its
caches, which way its branches go) fades. A rank that waits for a message sleeps.
"""

import statistics
import time

import torch

from step0_monolith.config import Config
from step0_monolith.options import parse, run_program
from step1_partition.stage import Stage
from step4_sharded.shard import shard
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.program import MeasureOptions, save
from step6_schedules.measure.rounds import spread

PROGRAM = "python -m step6_schedules.measure.after_sleep"
CONFIG = Config(num_layers=16, width=128, batch_size=32, num_microbatches=8, data="random")
ROWS = CONFIG.batch_size // CONFIG.num_microbatches
REPETITIONS = 60  # of a turn
SLEEP_SECONDS = 0.001


def turn(stage: Stage, inputs: torch.Tensor, gradient: torch.Tensor, sleep: float) -> tuple[float, float]:
    """Median microseconds of an F and of a B, each after so many seconds of sleep."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPETITIONS):
        for work, times in zip((stage.forward, stage.backward), taken, strict=True):
            if sleep:
                time.sleep(sleep)
            start = time.perf_counter()
            work(0, (inputs,) if work == stage.forward else (gradient,))
            times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(taken[0]), statistics.median(taken[1])


def main() -> None:
    """Measures both in turn, round after round."""
    (options,) = parse(PROGRAM, __doc__, {MeasureOptions: ["rounds", "json"]})
    torch.set_num_threads(1)
    stage = shard(CONFIG, 2, 0)
    inputs, gradient = torch.randn(ROWS, CONFIG.shape_of_layer(0)[0]), torch.randn(ROWS, CONFIG.width)
    turn(stage, inputs, gradient, 0.0)
    pairs = []
    for _ in range(options.rounds):
        hot, cold = (turn(stage, inputs, gradient, sleep) for sleep in (0.0, SLEEP_SECONDS))
        pairs.append((*hot, *cold))
    figures = []
    for index, op in enumerate("FB"):
        hot, cold = ([pair[index + shift] for pair in pairs] for shift in (0, 2))
        figure = Figure(
            "arithmetic after a sleep / without",
            f"{op} of 8 layers of {CONFIG.width}, {ROWS} rows",
            **of_spread(spread([c / h for c, h in zip(cold, hot, strict=True)])),
            beside={"without, us": statistics.median(hot), "after a sleep, us": statistics.median(cold)},
            samples={"without, us": hot, "after a sleep, us": cold},
        )
        figures.append(figure)
    save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
