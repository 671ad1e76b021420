"""torchrun --standalone --nproc-per-node 2 -m step6_schedules.break_it: 1F1B with blocking messages deadlocks.

Each receive is moved to just before the action that needs it, and each message is waited for at once. naive and GPipe
finish all the same; under 1F1B two neighbours send to each other and neither is there to receive.
"""

from collections.abc import Sequence

from step0_monolith.config import Config
from step0_monolith.options import parse, run_program
from step1_partition.partition import PartitionOptions
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import open_world
from step5_orchestrator.actions import Action, needs
from step5_orchestrator.executor import Executor
from step5_orchestrator.lowering import Instruction, Receive
from step5_orchestrator.program import choose_table
from step6_schedules.choose import ScheduleOptions
from step6_schedules.job import job_of

CONFIG = ("num_layers", "width", "batch_size", "num_microbatches", "num_iterations", "seed", "data", "dtype", "threads")


def with_late_receives(row: Sequence[Instruction]) -> list[Instruction]:
    """The same row, each receive moved to just before the action that needs its value."""
    receives = {instruction.value: instruction for instruction in row if isinstance(instruction, Receive)}
    late: list[Instruction] = []
    for instruction in row:
        if isinstance(instruction, Action):
            late.extend(receives[value] for value in needs(instruction) if value in receives)
        if not isinstance(instruction, Receive):
            late.append(instruction)
    return late


def block(executor: Executor) -> None:
    """Makes an executor wait for each message where it stands, with its receives placed late."""
    executor.row = with_late_receives(executor.row)
    send_at_once = executor._send

    def send_and_wait(*prepared) -> None:
        send_at_once(*prepared)
        executor._messages.flush()

    executor._send = send_and_wait


def main() -> None:
    """Trains under a schedule with blocking messages."""
    program = "step6_schedules.break_it"
    takes = {Config: CONFIG, ScheduleOptions: None, PartitionOptions: None, WorldOptions: None}
    config, schedule, parts, world_options = parse(torchrun_command(program, 2), __doc__, takes)
    launch, job = read_launch(program, at_least=2), job_of(program, __doc__)
    choice = choose_table(job, schedule, launch, launch.size, config, parts, None)
    with open_world(launch, world_options, config.threads) as world:
        table = choice.table(world)
        trainer = job.trainer(config, world, table, parts)
        block(trainer.pipeline.executor)
        trainer.train()
        if world.rank == 0:
            print(f"{table.name} with blocking messages finished {config.num_iterations} iterations")
        trainer.close()


if __name__ == "__main__":
    run_program(main)
