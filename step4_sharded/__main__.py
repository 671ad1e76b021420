"""torchrun --standalone --nproc-per-node 4 -m step4_sharded: each rank builds its stage; the forward is run."""

import torch

from step0_monolith.config import Config
from step0_monolith.data import batch, microbatches
from step0_monolith.model import layers, run_layers
from step0_monolith.options import parse, run_program
from step1_partition.partition import PartitionOptions, bounds, partition
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import open_world
from step4_sharded.forward import sharded_forward
from step4_sharded.shard import shard, size_of

CONFIG = ("num_layers", "width", "batch_size", "num_microbatches", "seed", "data", "dtype", "threads")


def main() -> None:
    takes = {Config: CONFIG, PartitionOptions: None, WorldOptions: None}
    config, options, world_options = parse(torchrun_command("step4_sharded"), __doc__, takes)
    launch = read_launch("step4_sharded")
    sizes = partition(config.num_layers, launch.size, options.layers_per_stage)
    with open_world(launch, world_options, config.threads) as world:
        stage = shard(config, world.size, world.rank, options.layers_per_stage, world.device)
        inputs = batch(config, 0)[0] if world.rank in (0, world.size - 1) else None
        pieces = microbatches(inputs, config.num_microbatches) if world.rank == 0 else None
        outputs = sharded_forward(world, stage, pieces)
        reports = world.gather((size_of(stage), _equal_to_monolith(config, inputs, outputs, world.device)))
        if world.rank == 0:
            all_parameters, all_bytes = (sum(column) for column in zip(*(size for size, _ in reports), strict=True))
            for rank, ((size, _), (start, stop)) in enumerate(zip(reports, bounds(sizes), strict=True)):
                count, nbytes = size
                print(
                    f"rank {rank}: layers {start}..{stop - 1}, {count:,} parameters, {nbytes:,} bytes, "
                    f"{nbytes / all_bytes:.0%} of the model"
                )
            print(f"monolith: {all_parameters:,} parameters, {all_bytes:,} bytes")
            equal, num_rows = reports[-1][1]
            print(f"outputs with the monolith's bits: {equal} of {num_rows} rows")


def _equal_to_monolith(config: Config, inputs, outputs, device) -> tuple[int, int] | None:
    """On the last rank, which builds the monolith for this comparison alone: rows that are equal, and all rows."""
    if not outputs:
        return None
    whole = [layer.to(device) for layer in layers(config)]
    equal = 0
    with torch.no_grad():
        for piece, output in zip(microbatches(inputs.to(device), config.num_microbatches), outputs, strict=True):
            (expected,) = run_layers(whole, (piece,))
            equal += int((expected == output).all(1).sum())
    return equal, len(inputs)


if __name__ == "__main__":
    run_program(main)
