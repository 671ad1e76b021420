"""torchrun --standalone --nproc-per-node 2 -m step4_sharded.break_it: weights that depend on the rank."""

import dataclasses

import torch

from step0_monolith.config import Config
from step0_monolith.data import batch, microbatches
from step0_monolith.model import layers, run_layers
from step0_monolith.options import parse, run_program
from step1_partition.partition import evenly
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import open_world
from step4_sharded.forward import sharded_forward
from step4_sharded.shard import shard


def main() -> None:
    """The sharded forward with a seed that depends on the rank, compared with the monolith."""
    program = "step4_sharded.break_it"
    (world_options,) = parse(torchrun_command(program, 2), __doc__, {WorldOptions: None})
    config = Config()
    launch = read_launch(program, at_least=2)
    evenly(config.num_layers, launch.size)
    with open_world(launch, world_options, config.threads) as world:
        own = dataclasses.replace(config, seed=config.seed + world.rank)  # the fault
        stage = shard(own, world.size, world.rank, device=world.device)
        inputs = batch(config, 0)[0].to(world.device)
        outputs = sharded_forward(world, stage, microbatches(inputs, 8) if world.rank == 0 else None)
        if world.rank == world.size - 1:
            with torch.no_grad():
                (expected,) = run_layers([layer.to(world.device) for layer in layers(config)], (inputs,))
            found = torch.cat(outputs)
            print(f"shapes: {tuple(found.shape)} and {tuple(expected.shape)}, nothing looks wrong")
            print(f"outputs with the monolith's bits: {int((found == expected).all(1).sum())} of {len(inputs)} rows")


if __name__ == "__main__":
    run_program(main)
