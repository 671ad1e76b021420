"""One activation to rank 1 and its gradient back, a round trip of many tensors, and what a message costs."""

from dataclasses import dataclass
from pathlib import Path

from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.files import check_writable
from step0_monolith.model import layers
from step0_monolith.options import (
    Options,
    RunError,
    UsageError,
    option,
    optional,
    output_file,
    parse,
    run_program,
    whole,
)
from step1_partition.partition import bounds, evenly
from step1_partition.stage import Stage
from step2_comms.contract import Spec
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.p2p import Messages, edges_of_a_line
from step2_comms.world import World, open_world
from step3_pingpong.curve import SMALLEST, Fit, Point, fit, measure
from step3_pingpong.picture import draw, size_name
from step3_pingpong.pingpong import agree, compare, ping_pong, uncut
from step3_pingpong.round_trip import round_trip, samples

CONFIG = ("num_layers", "width", "seed", "dtype", "threads")
LARGEST = 2**30


@dataclass(frozen=True)
class CurveOptions(Options):
    """What to measure, and where to draw it."""

    max_bytes: int = option(64 * 2**20, whole(SMALLEST), "largest message of the curve, bytes")
    curve: Path | None = option(None, optional(output_file(".png")), "file for the picture of the curve")

    def check_together(self) -> None:
        """Refuses a size that would fill the memory of a small machine."""
        if self.max_bytes > LARGEST:
            raise UsageError(f"--max-bytes {self.max_bytes} is more than {LARGEST} bytes, 1 GiB; lower it")


def play(world: World, messages: Messages, config: Config) -> None:
    """Ping-pong on one batch, each rank with its half of the layers; rank 0 prints what equals the uncut model.

    Raises RunError when anything does not.
    """
    ranges = bounds(evenly(config.num_layers, 2))
    start, stop = ranges[world.rank]
    cut = ranges[0][1]
    rows, targets = (tensor.to(world.device) for tensor in batch(config, 0))
    whole_model = [layer.to(world.device) for layer in layers(config)]
    stage = Stage([layer.to(world.device) for layer in layers(config, start, stop)], start)

    activation = Spec((config.batch_size, config.shape_of_layer(cut)[0]), config.torch_dtype)
    agree(messages, activation)
    received = ping_pong(messages, stage, rows, targets)
    found = world.gather(compare(received, stage, uncut(whole_model, cut, rows, targets)))
    if found is None:
        return
    equal = {name: same for of_rank in found for name, same in of_rank.items()}
    size = messages.bytes_sent
    print(f"stages: rank 0 has layers 0..{cut - 1}, rank 1 has layers {cut}..{config.num_layers - 1}")
    print(f"message: {activation}, {size:,} bytes there, as many back")
    if wrong := [name for name, same in equal.items() if not same]:
        raise RunError(f"not the uncut model's bits: {', '.join(wrong)}")
    print(f"equal to the uncut model, bit for bit: {len(equal)} of {len(equal)} tensors")


def check_round_trip(world: World, messages: Messages) -> None:
    """Sends the samples there and back; rank 0 prints how many values were checked. Raises RunError for a wrong one."""
    tensors = tuple(tensor.to(world.device) for tensor in samples())
    checked = world.gather(round_trip(messages, tensors))
    if checked is not None:
        print(f"round trip: {len(tensors)} tensors, {checked[0]:,} values, all checked on both ranks")


def print_curve(points: list[Point], fitted: Fit | None) -> None:
    """One line a size: microseconds one way and MB/s, through step 2's channels and with bare calls, and predicted."""
    print("             microseconds, one way                    MB/s")
    print("size         step 2       bare  predicted     step 2       bare")
    for point in points:
        num_bytes, ours, bare = point
        predicted = f"{1e6 * fitted.seconds(num_bytes):,.0f}" if fitted else "-"
        print(
            f"{size_name(num_bytes):8} {1e6 * ours:10,.0f} {1e6 * bare:10,.0f} {predicted:>10}"
            f" {num_bytes / ours / 1e6:10,.2f} {num_bytes / bare / 1e6:10,.2f}"
        )
    if fitted:
        latency, bandwidth = fitted
        print(f"predicted for bare calls: {1e6 * latency:,.0f} microseconds + bytes / ({bandwidth / 1e6:,.0f} MB/s)")
        print(f"half of that time is latency at {latency * bandwidth:,.0f} bytes")


def main() -> None:
    """Plays, checks, measures, and draws, in this order."""
    takes = {Config: CONFIG, WorldOptions: None, CurveOptions: None}
    config, world_options, options = parse(torchrun_command("step3_pingpong", 2), __doc__, takes)
    # Two ranks, not more: ranks that only look on would take time from the cores that are being measured.
    launch = read_launch("step3_pingpong", at_least=2, at_most=2)
    evenly(config.num_layers, launch.size)
    check_writable("--curve", options.curve)
    with open_world(launch, world_options, config.threads) as world:
        messages = Messages(world, edges_of_a_line(2))
        play(world, messages, config)
        check_round_trip(world, messages)
        points = measure(world, messages, options.max_bytes)
        messages.close()
        if points is not None:
            fitted = fit(points)
            print_curve(points, fitted)
            if options.curve:
                draw(
                    points,
                    fitted,
                    options.curve,
                    f"one message from rank 0 to rank 1 ({world.backend}, {world.device.type})",
                )


if __name__ == "__main__":
    run_program(main)
