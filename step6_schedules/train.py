"""torchrun --standalone --nproc-per-node 4 -m step6_schedules.train: the main job, with its proof and its picture.

Trains under a schedule, measures the bubble on a short stretch of emulated devices, and trains the monolith to compare
the final weights bit for bit.
"""

import dataclasses

from step0_monolith.checkpoints import CheckpointOptions
from step0_monolith.config import Config
from step0_monolith.options import RunError, parse, run_program
from step0_monolith.result import Result
from step0_monolith.train import ResultOptions, result_of, train
from step1_partition.partition import PartitionOptions
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch, torchrun_command
from step2_comms.world import World, open_world
from step5_orchestrator.checkpoint import Checkpoints
from step5_orchestrator.choose import caps_of
from step5_orchestrator.costs import costs
from step5_orchestrator.program import Job, check_outputs, choose_table, report
from step5_orchestrator.table import Table
from step6_schedules.choose import ScheduleOptions
from step6_schedules.job import job_of
from step6_schedules.views import ViewOptions, Views

STRETCH_ITERATIONS = 12
STRETCH_COST = costs(F=5.0, B=10.0)


def stretch_config(config: Config) -> Config:
    """The config of the stretch: a few iterations of the same sizes."""
    return dataclasses.replace(
        config,
        num_iterations=STRETCH_ITERATIONS,
        data="random",
        lr_schedule="constant",
        warmup_iterations=0,
        accumulate=1,
    )


def measure_stretch(
    job: Job, config: Config, world: World, table: Table, parts: PartitionOptions, views: ViewOptions, caps: list | None
) -> Result | None:
    """A few iterations of a run of its own, whose actions take F=5 and B=10 ms at least; the result on rank 0."""
    trainer = job.trainer(stretch_config(config), world, table, parts, emulate=STRETCH_COST)
    looking = Views(views, trainer, caps)
    trainer.train()
    result, said = trainer.result(), looking.write()
    if world.rank == 0:
        print(*said, sep="\n", end="\n" if said else "", flush=True)
    trainer.close()
    return result


def main() -> None:
    """Trains, measures, and compares."""
    program = "step6_schedules.train"
    takes = [Config, ScheduleOptions, PartitionOptions, WorldOptions, ResultOptions, ViewOptions, CheckpointOptions]
    parsed = parse(torchrun_command(program), __doc__, dict.fromkeys(takes))
    config, schedule, parts, world_options, output, views, saving = parsed
    launch, job = read_launch(program), job_of(program, __doc__)
    choice = choose_table(job, schedule, launch, launch.size, config, parts, STRETCH_COST)
    check_outputs(launch, output, views)
    with Checkpoints(saving, config, launch) as checkpoints, open_world(launch, world_options, config.threads) as world:
        table = choice.table(world)
        trainer = job.trainer(config, world, table, parts)
        checkpoints.start(trainer)
        trainer.train(show=True, checkpoints=checkpoints)
        result = trainer.result()
        trainer.close()
        caps = caps_of(schedule.memory_cap, launch.size)
        stretch = measure_stretch(job, config, world, table, parts, views, caps)
    if launch.rank == 0:
        result.bubble = stretch.bubble
        if output.result:
            result.write(output.result)
        conclude(config, table, result)


def conclude(config: Config, table: Table, result: Result) -> None:
    """Prints the numbers; trains the monolith and raises RunError unless the weights and losses are the same."""
    print(report(result, table, STRETCH_COST))
    print(
        f"(the bubble: median of {STRETCH_ITERATIONS} iterations in which each F takes 5 ms and each B 10 ms at least)"
    )
    print("training the monolith to compare ...", flush=True)
    expected = result_of(config, train(config))
    # As text, since a loss that is not a number is not even equal to itself.
    losses, wanted = ([loss.hex() for loss in some.losses] for some in (result, expected))
    if expected.weights_sha256 != result.weights_sha256 or losses != wanted:
        raise RunError(
            f"the final weights or losses differ from the monolith's, whose hash is {expected.weights_sha256}"
        )
    print(f"equal to the monolith, bit for bit: {len(expected.losses)} losses and all final weights")


if __name__ == "__main__":
    run_program(main)
