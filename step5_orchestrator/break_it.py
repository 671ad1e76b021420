"""torchrun --standalone --nproc-per-node 4 -m step5_orchestrator.break_it: rank 2 leaves in the middle, silently."""

import sys

from step0_monolith.config import Config
from step0_monolith.options import parse, run_program
from step1_partition.partition import evenly
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import open_world
from step5_orchestrator.naive import naive
from step5_orchestrator.trainer import Trainer

LEAVES_AT = 3


def main() -> None:
    """Trains; rank 2 exits with status 0 after three iterations."""
    program = "step5_orchestrator.break_it"
    (world_options,) = parse(torchrun_command(program), __doc__, {WorldOptions: None})
    config = Config()
    launch = read_launch(program, at_least=3)
    evenly(config.num_layers, launch.size)
    with open_world(launch, world_options, config.threads) as world:
        trainer = Trainer(config, world, naive(world.size, config.num_microbatches))
        for iteration in range(config.num_iterations):
            if world.rank == 2 and iteration == LEAVES_AT:
                sys.exit(0)  # the fault: its launcher takes this for success
            trainer.step()


if __name__ == "__main__":
    run_program(main)
