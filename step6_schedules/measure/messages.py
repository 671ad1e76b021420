"""torchrun --standalone --nproc-per-node 2 -m step6_schedules.measure.messages: what a message costs, ours over bare.

Round trips of a small message (latency) and of a large one (bandwidth), through the channels of step 2 and with bare
`dist.send` and `dist.recv`, in turn; each rank posts its receive when it is about to wait for it, in both ways.
"""

import statistics
import time
from dataclasses import dataclass

import torch

from step0_monolith.options import Options, option, parse, run_program, whole
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.p2p import Messages, edges_of_a_line
from step2_comms.world import World, open_world
from step3_pingpong.curve import SMALLEST, bare_group, round_trips
from step3_pingpong.picture import size_name
from step6_schedules.measure.figures import Figure, of_spread
from step6_schedules.measure.load import Load
from step6_schedules.measure.program import MeasureOptions, save
from step6_schedules.measure.rounds import spread

PROGRAM = "step6_schedules.measure.messages"
SMALL_ROUNDS = 100  # round trips of the small message in place of one of the large
LATENCY_GOAL, BANDWIDTH_GOAL = 1.10, 0.95


@dataclass(frozen=True)
class MessageOptions(Options):
    """What is sent."""

    large_bytes: int = option(64 * 2**20, whole(SMALLEST, 2**30), "bytes of the message whose bandwidth is measured")


def measure(world: World, large_bytes: int, rounds: int) -> list[Figure]:
    """Latency and bandwidth, on both ranks; rank 0's are the ones of interest.

    large_bytes: of the message whose bandwidth is measured. rounds: its counted round trips.
    """
    messages = Messages(world, edges_of_a_line(2))
    load, found, others = Load(), {}, {}
    with bare_group(world) as group:
        for num_bytes, count in ((SMALLEST, SMALL_ROUNDS * rounds), (large_bytes, rounds)):
            load.start()
            cpu = time.process_time()
            found[num_bytes] = round_trips(world, messages, group, num_bytes, count)
            own = world.sum(torch.tensor([time.process_time() - cpu], dtype=torch.float64)).item()
            others[num_bytes] = load.stop(own)
    messages.close()
    return [
        _latency(*found[SMALLEST], others[SMALLEST]),
        _bandwidth(large_bytes, *found[large_bytes], others[large_bytes]),
    ]


def _latency(ours: list[float], bare: list[float], others: float) -> Figure:
    return Figure(
        "message latency, ours / bare",
        size_name(SMALLEST),
        **of_spread(spread([a / b for a, b in zip(ours, bare, strict=True)])),
        goal=LATENCY_GOAL,
        others=others,
        beside={"ours, us": 1e6 * statistics.median(ours), "bare, us": 1e6 * statistics.median(bare)},
        samples={"ours": [1e6 * s for s in ours], "bare": [1e6 * s for s in bare]},
    )


def _bandwidth(num_bytes: int, ours: list[float], bare: list[float], others: float) -> Figure:
    rates = {"ours": [num_bytes / s / 1e6 for s in ours], "bare": [num_bytes / s / 1e6 for s in bare]}
    return Figure(
        "message bandwidth, ours / bare",
        size_name(num_bytes),
        **of_spread(spread([a / b for a, b in zip(*rates.values(), strict=True)])),
        goal=BANDWIDTH_GOAL,
        at_most=False,
        others=others,
        beside={f"{who}, MB/s": statistics.median(values) for who, values in rates.items()},
        samples=rates,
    )


def main() -> None:
    """Measures both sizes."""
    takes = {MeasureOptions: ["rounds", "json"], MessageOptions: None, WorldOptions: ["device", "timeout"]}
    options, chosen, world_options = parse(torchrun_command(PROGRAM, 2), __doc__, takes)
    launch = read_launch(PROGRAM, at_least=2, at_most=2)
    with open_world(launch, world_options) as world:
        figures = measure(world, chosen.large_bytes, options.rounds)
    if launch.rank == 0:
        save(figures, options.json)


if __name__ == "__main__":
    run_program(main)
