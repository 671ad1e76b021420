"""python -m step6_schedules.table NAME|FILE.csv: a schedule's table on paper, with its numbers.

Prints the cells where they stand in time, the makespan beside the shortest one possible, the bubble, and what each rank
holds. Runs no process and needs no torchrun.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from step0_monolith.files import check_writable, write_whole
from step0_monolith.options import UsageError, option, optional, output_file, parse, run_program, whole
from step5_orchestrator.choose import Choice, caps_of, name_or_file, show_refused
from step5_orchestrator.costs import Cost
from step5_orchestrator.spreadsheet import read_csv, write_csv
from step5_orchestrator.table import Table, TableError
from step5_orchestrator.words import counted, named
from step6_schedules.choose import NAMES, TableOptions, cost_of, table_of
from step6_schedules.lower_bound import lower_bound
from step6_schedules.page import MAX_ACTIONS, other_timelines, write_page
from step6_schedules.placement import placement_of
from step6_schedules.render import draw_text
from step6_schedules.schedules import SCHEDULES
from step6_schedules.simulate import Simulation
from step6_schedules.timed import predicted
from step6_schedules.timeline import draw_table

DEFAULT_RANKS, DEFAULT_MICROBATCHES = 4, 8
MAX_CELLS = 2_000_000
MAX_LANES = 256


@dataclass(frozen=True)
class PaperOptions(TableOptions):
    """Which table, of which size, and where it goes."""

    schedule: str = option(
        "", name_or_file(NAMES), f"{', '.join(NAMES)}, or a table from a spreadsheet", argument="NAME|FILE.csv"
    )
    num_ranks: int | None = option(
        None, optional(whole(1, 4096)), f"ranks (default: {DEFAULT_RANKS}, or the rows of the file)"
    )
    num_microbatches: int | None = option(
        None, optional(whole(1, 1_000_000)), f"microbatches (default: {DEFAULT_MICROBATCHES}, or those of the file)"
    )
    csv: Path | None = option(None, optional(output_file(".csv")), "file for the table as a spreadsheet")
    json: Path | None = option(None, optional(output_file(".json")), "file for the rows and the numbers")
    png: Path | None = option(None, optional(output_file(".png", ".svg")), "file for a picture of the table")
    html: Path | None = option(
        None, optional(output_file(".html")), "file for a page to zoom and step through it, beside other schedules"
    )


def sizes_of(options: PaperOptions) -> tuple[int, int]:
    """Ranks and microbatches: the given ones, else a file's own, else 4 and 8. Raises UsageError for too large ones."""
    num_ranks, num_microbatches = options.num_ranks, options.num_microbatches
    if options.schedule not in NAMES and None in (num_ranks, num_microbatches):
        table = read_csv(Path(options.schedule), num_ranks, num_microbatches)
        return num_ranks or table.num_ranks, num_microbatches or table.num_microbatches
    num_ranks, num_microbatches = num_ranks or DEFAULT_RANKS, num_microbatches or DEFAULT_MICROBATCHES
    schedule = SCHEDULES.get(options.schedule)
    chunks = options.num_chunks or (schedule.default_chunks if schedule else 2)
    cells = num_ranks * num_microbatches * chunks * (3 if schedule is None or schedule.splits else 2)
    if cells > MAX_CELLS:
        raise UsageError(
            f"--num-ranks {num_ranks} and --num-microbatches {num_microbatches} make {cells} cells, and {MAX_CELLS} is "
            f"the most; take fewer"
        )
    return num_ranks, num_microbatches


def check_picture(table: Table, flag: str, path: Path | None, most_actions: int = MAX_CELLS) -> None:
    """Raises UsageError for a picture with more lanes or actions than anybody could look at."""
    if path is None:
        return
    if table.num_ranks > MAX_LANES:
        raise UsageError(f"{flag} {str(path)!r} has room for {MAX_LANES} ranks, not {table.num_ranks}")
    if len(table.order) > most_actions:
        raise UsageError(f"{flag} {str(path)!r} has room for {most_actions} actions, not {len(table.order)}")


def as_json(simulation: Simulation, shortest: float) -> str:
    """The rows and the numbers as one JSON object."""
    table = simulation.table
    found = {
        "schedule": table.name,
        "num_ranks": table.num_ranks,
        "num_stages": table.num_stages,
        "num_microbatches": table.num_microbatches,
        "makespan": _plain(simulation.makespan),
        "bubble_fraction": simulation.bubble,
        "peak_in_flight": simulation.peak_in_flight,
        "lower_bound": _plain(shortest),
        "max_span": _plain(simulation.max_span),
        "adds_in_order": not table.unordered_stages,
        "rows": [table.cells(rank) for rank in range(table.num_ranks)],
    }
    return json.dumps(found) + "\n"


def describe(simulation: Simulation, shortest: float) -> str:
    """The numbers in words."""
    table, cost = simulation.table, simulation.cost
    placement, chunks = placement_of(table)
    above = simulation.makespan - shortest
    is_shortest = above <= 1e-9 * shortest
    distance = "no order of these actions is shorter" if is_shortest else f"{above:g} more, {above / shortest:.1%}"
    lines = [
        f"{table.name}: {counted(table.num_ranks, 'rank')}, {counted(chunks or 'different numbers of', 'chunk')} a "
        f"rank ({placement}), {counted(table.num_microbatches, 'microbatch')}",
        f"makespan {simulation.makespan:g} ({cost.text(table.ops)}); lower bound {shortest:g}: {distance}",
        f"bubble {simulation.bubble:.3f}",
        f"peak in flight {' '.join(map(str, simulation.peak_in_flight))}",
    ]
    if table.unordered_stages:
        lines.append(f"adds in another order: the weight gradients of {named('stage', table.unordered_stages)}")
    return "\n".join(lines)


def _plain(value: float) -> float | int:
    rounded = round(value, 9)
    return int(rounded) if rounded == int(rounded) else rounded


def show(options: PaperOptions) -> None:
    """Prints the table and writes the files that were asked for."""
    cost = cost_of(options)
    choice = choice_for(options, cost)
    table = choice.make()
    check_picture(table, "--png", options.png)
    check_picture(table, "--html", options.html, MAX_ACTIONS)
    simulation = Simulation(table, cost)
    caps = caps_of(options.memory_cap, table.num_ranks)
    shortest = lower_bound(table, cost, caps)
    if choice.bound is not None:
        shortest = max(shortest, choice.bound())
    print(draw_text(simulation))
    print()
    print(describe(simulation, shortest))
    if choice.say is not None:
        print(choice.say(table))
    if options.csv:
        write_csv(table, options.csv)
    if options.json:
        write_whole(options.json, lambda temporary: temporary.write_text(as_json(simulation, shortest)))
    if options.png:
        draw_table(options.png, table, cost, caps)
    if options.html:
        planned = predicted(table, cost, "slots", caps)
        write_page(options.html, [planned, *other_timelines(planned)])


def choice_for(options: PaperOptions, cost: Cost) -> Choice:
    """The table that was asked for; a refused one is printed with the place marked before the error is raised."""
    try:
        num_ranks, num_microbatches = sizes_of(options)
        return table_of(options.schedule, options, num_ranks, num_microbatches, cost)
    except TableError as error:
        show_refused(error)
        raise


def main() -> None:
    """Reads the command line and shows the table."""
    (options,) = parse("python -m step6_schedules.table", __doc__, {PaperOptions: None})
    for flag in ("csv", "json", "png", "html"):
        check_writable(f"--{flag}", getattr(options, flag))
    show(options)


if __name__ == "__main__":
    run_program(main)
