"""Rank 0 turns its activation round before it sends it, against the contract; both ends say so."""

from step0_monolith.options import parse, run_program
from step2_comms.__main__ import ACTIVATION, first_input, open_line
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import open_world


def main() -> None:
    """The command."""
    program = "step2_comms.break_it"
    (world_options,) = parse(torchrun_command(program, 2), __doc__, {WorldOptions: None})
    launch = read_launch(program, at_least=2, at_most=2)
    with open_world(launch, world_options) as world:
        messages = open_line(world)
        if world.rank == 0:
            # The same 128 numbers. Without the contract they would arrive, in the wrong places.
            messages.send_forward(ACTIVATION, [first_input(world.device).t()])
        else:
            messages.recv_forward(ACTIVATION)


if __name__ == "__main__":
    run_program(main)
