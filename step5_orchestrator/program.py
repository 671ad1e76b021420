"""The command of steps 5 and 6: train under a schedule, then say what was predicted and what was measured."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from step0_monolith.checkpoints import CheckpointOptions
from step0_monolith.config import Config
from step0_monolith.files import check_writable
from step0_monolith.options import Options, UsageError, flag_of, parse
from step0_monolith.result import Result
from step0_monolith.train import ResultOptions
from step1_partition.partition import PartitionOptions, evenly, partition
from step1_partition.stage import Stage
from step2_comms.device import WorldOptions
from step2_comms.launch import Launch, read_launch, torchrun_command
from step2_comms.world import World, open_world
from step5_orchestrator.checkpoint import Checkpoints
from step5_orchestrator.choose import Choice, caps_of, show_refused
from step5_orchestrator.costs import UNIT_COST, Cost
from step5_orchestrator.emulate import EmulateOptions
from step5_orchestrator.prediction import peak_in_flight
from step5_orchestrator.replicas import ReplicaOptions
from step5_orchestrator.table import Table, TableError
from step5_orchestrator.trainer import Trainer
from step5_orchestrator.words import counted, named


class View(Protocol):
    """What looks at a run."""

    def write(self) -> list[str]:
        """Writes what was asked for; called on every rank after the training. Returns what rank 0 should say of it."""


@dataclass(frozen=True)
class Job:
    """What a step brings to the common command.

    choose(options, num_ranks, num_microbatches, emulated cost or None) gives the table; predicted(options, emulated)
    the cost of the prediction; split_stage is the class of stages that can split their backward, if there is one.
    """

    module: str
    description: str
    schedule_class: type[Options]
    choose: Callable[[Options, int, int, Cost | None], Choice]
    predicted: Callable[[Options, Cost | None], Cost] = lambda options, emulated: emulated or UNIT_COST
    split_stage: type[Stage] = Stage

    def trainer(self, config: Config, world: World, table: Table, parts: PartitionOptions, **more) -> Trainer:
        """A trainer of the table, with the stages that it needs."""
        stage_class = self.split_stage if "W" in table.ops else Stage
        return Trainer(config, world, table, layers_per_stage=parts.layers_per_stage, stage_class=stage_class, **more)


def report(result: Result, table: Table, cost: Cost) -> str:
    """What a run says at its end."""
    replicas = result.num_ranks // table.num_ranks
    chunks = result.num_stages / table.num_ranks
    several = "" if chunks == 1 else f"{counted(int(chunks), 'chunk')} a rank, "
    if chunks != int(chunks):
        several = f"{counted(result.num_stages, 'stage')}, "
    each = "" if replicas == 1 else f"{replicas} replicas of "
    measured = result.bubble["measured"]
    lines = [
        f"schedule {result.schedule}: {each}{counted(table.num_ranks, 'rank')}, {several}"
        f"{counted(result.num_microbatches, 'microbatch')}",
        f"bubble: predicted {result.bubble['predicted']:.3f} ({cost.text(table.ops)}), "
        + ("nothing was left to measure" if measured is None else f"measured {measured:.3f}"),
    ]
    if measured is not None:
        lines.append(f"peak in flight: predicted {peak_in_flight(table) * replicas}, measured {result.peak_in_flight}")
    if result.test_accuracy is not None:
        lines.append(f"test accuracy {result.test_accuracy:.4f}")
    if table.unordered_stages:
        stages = named("stage", table.unordered_stages)
        lines.append(f"adds in another order: the weight gradients of {stages}, so the bits may not be the monolith's")
    return "\n".join([*lines, f"weights sha256 {result.weights_sha256}"])


def choose_table(
    job: Job, options: Options, launch: Launch, num_ranks: int, config: Config, parts: PartitionOptions, emulated
) -> Choice:
    """The table of a run, for so many ranks, checked before any process group opens.

    Raises UsageError when the table cannot be run, or the layers cannot be shared out among its stages.
    """
    evenly(config.num_layers, num_ranks)  # before a table of any number of ranks is built
    try:
        choice = job.choose(options, num_ranks, config.num_microbatches, emulated)
    except TableError as error:
        if launch.rank == 0:
            show_refused(error)
        raise
    partition(config.num_layers, choice.num_stages, parts.layers_per_stage)
    return choice


def check_outputs(launch: Launch, *outputs: Options) -> None:
    """Raises UsageError for output files that could not be written, or are one, on all ranks of rank 0's host."""
    if launch.rank != launch.local_rank:
        return
    given = {flag_of(n): p for options in outputs for n, p in vars(options).items() if isinstance(p, Path)}
    for flag, path in given.items():
        check_writable(flag, path)
        twin = next((other for other in given if other != flag and given[other].resolve() == path.resolve()), None)
        if twin is not None:
            raise UsageError(f"{flag} and {twin} name one file, {str(path)!r}; give each a file of its own")


def train_program(
    job: Job,
    extra: type[Options] | None = None,
    view: Callable[[Options, Trainer, list[int] | None], "View"] | None = None,
) -> None:
    """Reads the command line, trains, and reports on rank 0.

    extra, view: options of a step's own, and what looks at the run that they describe: it is made on every rank before
    the training, from the options, the trainer and the ranks' caps.
    """
    classes = [Config, job.schedule_class, PartitionOptions, WorldOptions, EmulateOptions, ResultOptions]
    classes += [ReplicaOptions, CheckpointOptions]
    parsed = parse(
        torchrun_command(job.module), job.description, dict.fromkeys([*classes, *([extra] if extra else [])])
    )
    config, schedule, parts, world_options, emulation, output, replication, saving, *extras = parsed
    launch = read_launch(job.module)
    num_ranks = replication.ranks_of_each(launch, config, job.module)
    choice = choose_table(job, schedule, launch, num_ranks, config, parts, emulation.emulate)
    check_outputs(launch, output, *extras)
    with Checkpoints(saving, config, launch) as checkpoints, open_world(launch, world_options, config.threads) as world:
        table = choice.table(world)
        cost = job.predicted(schedule, emulation.emulate)
        more = {"emulate": emulation.emulate, "cost": cost, "data_parallel": replication.data_parallel}
        trainer = job.trainer(config, world, table, parts, **more)
        checkpoints.start(trainer)
        caps = caps_of(schedule.memory_cap, num_ranks)
        views = [view(options, trainer, caps) for options in extras] if view is not None else []
        trainer.train(show=True, checkpoints=checkpoints)
        result = trainer.result()
        if result is not None:
            print(report(result, table, trainer.predicted_cost), flush=True)
            if trainer.left_out():
                print(trainer.left_out(), flush=True)
            if output.result:
                result.write(output.result)
        for each in views:
            said = each.write()
            if world.rank == 0:
                print(*said, sep="\n", end="\n" if said else "", flush=True)
        trainer.close()
