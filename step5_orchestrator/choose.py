"""Which table a run uses: a schedule by name, or a table from a file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from step0_monolith.options import Options, UsageError, option, optional, whole
from step2_comms.world import World
from step5_orchestrator.actions import parse_action
from step5_orchestrator.costs import Cost
from step5_orchestrator.grid import marked_rows
from step5_orchestrator.legality import check
from step5_orchestrator.naive import naive
from step5_orchestrator.spreadsheet import read_csv
from step5_orchestrator.table import Table, TableError, make_table
from step5_orchestrator.words import counted

NAMES = {"naive": naive}


def name_or_file(names: Sequence[str]) -> Callable[[str, str], str]:
    """A converter of `--schedule`: one of the names, or a file that ends in .csv."""

    def convert(flag: str, value: str) -> str:
        if value not in names and not value.lower().endswith(".csv"):
            raise UsageError(f"{flag} {value!r} is unknown; the known ones are: {', '.join(names)}, or a FILE.csv")
        return value

    convert.names = (*names, "FILE.csv")
    return convert


def read_caps(flag: str, value: str | tuple[int, ...]) -> tuple[int, ...]:
    """`K`, the same for every rank, or `K0,K1,...`, one for each."""
    if isinstance(value, tuple):
        return value
    return tuple(whole(1, 10**9)(flag, part.strip()) for part in str(value).split(","))


def caps_of(given: tuple[int, ...] | None, num_ranks: int) -> list[int] | None:
    """One cap for each rank. Raises UsageError when their number is neither 1 nor that of the ranks."""
    if given is None:
        return None
    if len(given) not in (1, num_ranks):
        raise UsageError(f"--memory-cap has {len(given)} numbers; give one, or one for each of the {num_ranks} ranks")
    return list(given) * num_ranks if len(given) == 1 else list(given)


@dataclass(frozen=True)
class MemoryOptions(Options):
    """How much a rank may hold."""

    memory_cap: tuple[int, ...] | None = option(
        None, optional(read_caps), "most chunk activations that a rank may hold: K, or K0,K1,... (default: no limit)"
    )


@dataclass(frozen=True)
class ScheduleOptions(MemoryOptions):
    """Which table the ranks run, in step 5."""

    schedule: str = option("naive", name_or_file(list(NAMES)), "name of the schedule, or a table from a spreadsheet")


@dataclass(frozen=True)
class Choice:
    """A table, or what will make it. The table of a search is made by rank 0 alone and sent to the others.

    say: what rank 0 says about it. bound: a makespan that the search has proved to be the least, once it is made.
    """

    num_stages: int
    make: Callable[[], Table]
    is_searched: bool = False
    say: Callable[[Table], str] | None = None
    bound: Callable[[], float] | None = None

    def table(self, world: World) -> Table:
        """The table, the same on every rank; called on every rank."""
        key = world.new_key("table")
        if world.rank == 0 or not self.is_searched:
            table = self.make()
            if world.rank == 0 and self.say is not None:
                print(self.say(table), flush=True)
            if self.is_searched:
                world.store.set(key, json.dumps([[*map(str, row)] for row in table.rows]))
            return table
        rows = json.loads(world.fetch(key, "the table that rank 0 searches for", 0))
        return make_table("auto", [[parse_action(cell) for cell in row] for row in rows])


def fixed(table: Table) -> Choice:
    """The choice of a table that is there already."""
    return Choice(table.num_stages, lambda: table)


def table_from_file(path: str, num_ranks: int, num_microbatches: int) -> Table:
    """The legal table in a CSV file. Raises UsageError when it is for other ranks or microbatches."""
    table = read_csv(Path(path), num_ranks, num_microbatches)
    check(table)
    if table.num_microbatches != num_microbatches:
        raise UsageError(
            f"--schedule {path}: the table has {counted(table.num_microbatches, 'microbatch')}; say --num-microbatches "
            f"{table.num_microbatches}, not {num_microbatches}"
        )
    return table


def choose(options: ScheduleOptions, num_ranks: int, num_microbatches: int, emulated: Cost | None = None) -> Choice:
    """The table of step 5: naive, or a file's. Raises UsageError when it cannot be run or exceeds the memory cap."""
    name, caps = options.schedule, caps_of(options.memory_cap, num_ranks)
    table = (
        NAMES[name](num_ranks, num_microbatches)
        if name in NAMES
        else table_from_file(name, num_ranks, num_microbatches)
    )
    check(table, caps)
    return fixed(table)


def show_refused(error: TableError) -> None:
    """Prints the refused table with the place marked, when the error knows it."""
    if error.table is not None:
        print(marked_rows(error.table, error.places), flush=True)
