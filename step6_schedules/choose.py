"""Which table a run of step 6 uses: a schedule by name, a file's, or the one that a search finds."""

from dataclasses import dataclass

from step0_monolith.options import UsageError, one_of, option, optional, whole
from step5_orchestrator.choose import Choice, MemoryOptions, caps_of, fixed, name_or_file, table_from_file
from step5_orchestrator.costs import UNIT_COST, Cost, read_costs
from step5_orchestrator.legality import check
from step5_orchestrator.table import Table
from step5_orchestrator.words import counted
from step6_schedules.auto import search_for
from step6_schedules.placement import placement_of
from step6_schedules.schedules import SCHEDULES, Schedule

NAMES = [*SCHEDULES, "auto"]


@dataclass(frozen=True)
class TableOptions(MemoryOptions):
    """What else decides about a table."""

    num_chunks: int | None = option(
        None, optional(whole(1, 1000)), "chunks that each rank holds (default: what the schedule has: 1, or 2)"
    )
    placement: str | None = option(
        None,
        optional(one_of("loop", "v")),
        "where the stages lie: loop (stage s on rank s mod P) or v (rank r holds stages r and 2P-1-r) (default: the "
        "schedule's)",
    )
    cost: Cost | None = option(
        None,
        optional(lambda flag, value: read_costs(flag, value, "F=1,B=2,I=1,W=1,comm=0")),
        "times that the prediction and the search take an action and a message to cost (default: F=1,B=2, or those of "
        "--emulate)",
    )
    split: str | None = option(
        None,
        optional(one_of("yes", "no")),
        "whether auto splits the backward into I and W (default: yes when --cost names I or W and no B)",
    )


@dataclass(frozen=True)
class ScheduleOptions(TableOptions):
    """Which table the ranks run."""

    schedule: str = option("1f1b", name_or_file(NAMES), "name of the schedule, or a table from a spreadsheet")


def cost_of(options: TableOptions, emulated: Cost | None = None) -> Cost:
    """What actions cost in the prediction: --cost, else the emulated times, else F=1, B=2."""
    return options.cost or emulated or UNIT_COST


def choose(options: ScheduleOptions, num_ranks: int, num_microbatches: int, emulated: Cost | None = None) -> Choice:
    """The table of a run. Raises UsageError when there is none, or when a flag contradicts it."""
    return table_of(options.schedule, options, num_ranks, num_microbatches, cost_of(options, emulated))


def table_of(name: str, options: TableOptions, num_ranks: int, num_microbatches: int, cost: Cost) -> Choice:
    """The table of that name, legal and within the memory cap; auto's is searched for when it is asked for.

    Raises UsageError when there is none, or when a flag contradicts it.
    """
    caps = caps_of(options.memory_cap, num_ranks)
    if name == "auto":
        return search_for(options, num_ranks, num_microbatches, cost, caps)
    if name in SCHEDULES:
        table = named(SCHEDULES[name], options, num_ranks, num_microbatches, cost)
    else:
        table = table_from_file(name, num_ranks, num_microbatches)
        _agrees(table, options)
    _splits(table, options)
    check(table, caps)
    return fixed(table)


def named(schedule: Schedule, options: TableOptions, num_ranks: int, num_microbatches: int, cost: Cost) -> Table:
    """The table of a published schedule. Raises UsageError for chunks or a placement that it does not have."""
    chunks = options.num_chunks or schedule.default_chunks
    if schedule.only_chunks is not None and chunks != schedule.only_chunks:
        others = ", ".join(s.name for s in SCHEDULES.values() if s.only_chunks in (None, chunks))
        raise UsageError(
            f"--num-chunks {chunks}: {schedule.name} has {counted(schedule.only_chunks, 'chunk')} a rank; leave the "
            f"flag out, or choose among {others}, auto"
        )
    if options.placement not in (None, schedule.placement):
        others = ", ".join(s.name for s in SCHEDULES.values() if s.placement == options.placement)
        raise UsageError(
            f"--placement {options.placement}: {schedule.name} has its stages in a {schedule.placement}; leave the "
            f"flag out, or choose among {others}, auto"
        )
    return schedule.table(num_ranks, num_microbatches, chunks, cost)


def _agrees(table: Table, options: TableOptions) -> None:
    placement, chunks = placement_of(table)
    if options.placement not in (None, placement):
        raise UsageError(
            f"--placement {options.placement}, but the rows of {table.name} have the placement {placement}"
        )
    if options.num_chunks not in (None, chunks):
        raise UsageError(
            f"--num-chunks {options.num_chunks}, but {table.name} has "
            f"{counted(chunks or 'different numbers of', 'chunk')} a rank"
        )


def _splits(table: Table, options: TableOptions) -> None:
    does = "yes" if "W" in table.ops else "no"
    if options.split not in (None, does):
        verb = "splits" if does == "yes" else "does not split"
        raise UsageError(
            f"--split {options.split}: {table.name} {verb} the backward; leave the flag out, or choose auto"
        )
