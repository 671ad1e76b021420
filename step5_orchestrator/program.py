"""The command of steps 5 and 6: train under a schedule, then say what was predicted and what was measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from step0_monolith.config import Config
from step0_monolith.files import check_writable
from step0_monolith.options import Options, UsageError, option, parse
from step0_monolith.result import Result
from step0_monolith.train import ResultOptions
from step1_partition.partition import PartitionOptions, evenly, partition
from step2_comms.device import WorldOptions
from step2_comms.launch import Launch, read_launch, torchrun_command
from step2_comms.world import open_world
from step5_orchestrator.emulate import EmulateOptions
from step5_orchestrator.prediction import peak_in_flight
from step5_orchestrator.table import Table, check
from step5_orchestrator.trainer import Trainer

Schedules = Mapping[str, Callable[[int, int], Table]]


def schedule_options(schedules: Schedules, default: str) -> type[Options]:
    """An option class whose `--schedule` knows the given names."""

    def convert(flag: str, value: str) -> str:
        if value not in schedules:
            raise UsageError(f"{flag} {value!r} is unknown; the known ones are: {', '.join(schedules)}")
        return value

    convert.names = tuple(schedules)

    @dataclass(frozen=True)
    class ScheduleOptions(Options):
        """Which table the ranks run."""

        schedule: str = option(default, convert, "name of the schedule")

    return ScheduleOptions


def report(result: Result, table: Table, cost: Mapping[str, float]) -> str:
    """What a run says at its end."""
    costs = ", ".join(f"{op}={value:g}" for op, value in cost.items())
    lines = [
        f"schedule {result.schedule}: {result.num_ranks} ranks, {result.num_microbatches} microbatches",
        f"bubble: predicted {result.bubble['predicted']:.3f} ({costs}), measured {result.bubble['measured']:.3f}",
        f"peak in flight: predicted {peak_in_flight(table)}, measured {result.peak_in_flight}",
    ]
    if result.test_accuracy is not None:
        lines.append(f"test accuracy {result.test_accuracy:.4f}")
    return "\n".join([*lines, f"weights sha256 {result.weights_sha256}"])


def choose_table(schedules: Schedules, name: str, launch: Launch, config: Config, parts: PartitionOptions) -> Table:
    """The table of a run, checked before any process group opens.

    Raises UsageError when the table cannot be run, or the layers cannot be shared out among its stages.
    """
    evenly(config.num_layers, launch.size)  # before a table of any number of ranks is built
    table = schedules[name](launch.size, config.num_microbatches)
    check(table)
    partition(config.num_layers, table.num_stages, parts.layers_per_stage)
    return table


def check_outputs(launch: Launch, *outputs: Options) -> None:
    """Raises UsageError for an output file that could not be written, on all ranks of rank 0's host."""
    if launch.rank == launch.local_rank:
        for options in outputs:
            for name, path in vars(options).items():
                check_writable(f"--{name}", path)


def train_program(
    module: str,
    description: str,
    schedules: Schedules,
    schedule_class: type[Options],
    extra: type[Options] | None = None,
    after: Callable[[Options, Trainer], None] | None = None,
) -> None:
    """Reads the command line, trains, and reports on rank 0. extra, after: options of a step's own, and their work."""
    classes = [Config, schedule_class, PartitionOptions, WorldOptions, EmulateOptions, ResultOptions]
    parsed = parse(torchrun_command(module), description, dict.fromkeys([*classes, *([extra] if extra else [])]))
    config, schedule, parts, world_options, emulation, output, *extras = parsed
    launch = read_launch(module)
    table = choose_table(schedules, schedule.schedule, launch, config, parts)
    check_outputs(launch, output, *extras)
    with open_world(launch, world_options, config.threads) as world:
        trainer = Trainer(config, world, table, layers_per_stage=parts.layers_per_stage, emulate=emulation.emulate)
        trainer.train(show=True)
        result = trainer.result()
        if result is not None:
            print(report(result, table, trainer.predicted_cost), flush=True)
            if output.result:
                result.write(output.result)
        if after is not None:
            after(*extras, trainer)
        trainer.close()
