"""python -m step6_schedules.worksheet FILE.csv: checks a schedule drawn by hand, and compares it with 1F1B.

A line a rank, a column a slot; a forward and a backward take a slot each, and a value is there in the slot after that
of the action that makes it. With --empty it writes a sheet to fill, in a spreadsheet program for example.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from step0_monolith.files import check_writable, write_whole
from step0_monolith.options import Options, UsageError, option, optional, output_file, parse, run_program, switch, whole
from step2_comms.launch import torchrun_command
from step5_orchestrator.prediction import peak_in_flight
from step5_orchestrator.spreadsheet import write_csv
from step5_orchestrator.words import counted
from step6_schedules.lower_bound import lower_bound
from step6_schedules.one_f_one_b import one_f_one_b
from step6_schedules.sheet import SLOT, Sheet, draw_sheet, empty_sheet, read_sheet
from step6_schedules.simulate import Simulation

DEFAULT_RANKS, DEFAULT_MICROBATCHES = 4, 8
MAX_FAULTS = 60  # that are printed, and as many missing actions a rank


@dataclass(frozen=True)
class SheetOptions(Options):
    """Which sheet, and what is made of it."""

    sheet: Path = option(Path(), output_file(".csv"), "the sheet", argument="FILE.csv")
    empty: bool = option(False, switch, "write an empty sheet to fill, in a file that is not there yet")
    num_ranks: int = option(DEFAULT_RANKS, whole(1, 64), "ranks of the empty sheet")
    num_microbatches: int | None = option(
        None,
        optional(whole(1, 256)),
        f"microbatches (default: {DEFAULT_MICROBATCHES} of the empty sheet; of a filled one those that it names)",
    )
    table: Path | None = option(None, optional(output_file(".csv")), "file for a legal sheet's table, to train with")


def verdict(sheet: Sheet) -> str:
    """What a sheet is: every mistake with its reason, or its numbers beside those of 1F1B."""
    if not sheet.is_legal:
        faults = list(map(str, sheet.faults[:MAX_FAULTS]))
        if len(sheet.faults) > MAX_FAULTS:
            faults.append(f"... and {len(sheet.faults) - MAX_FAULTS} more")
        return "\n".join([*faults, *missing_lines(sheet)])
    table = sheet.table()
    makespan, shortest = sheet.num_slots, lower_bound(table, SLOT)
    work = 2 * sheet.num_microbatches
    lines = [
        f"legal: {counted(sheet.num_ranks, 'rank')}, {counted(sheet.num_microbatches, 'microbatch')}",
        f"makespan {makespan} slots (no order is shorter than {shortest:g}), bubble {1 - work / makespan:.3f}",
        f"peak in flight {' '.join(map(str, peak_in_flight(table)))}",
    ]
    waits = makespan - Simulation(table, SLOT).makespan
    if waits > 0:
        lines.append(f"{counted(round(waits), 'slot')} shorter if every action started as soon as it can")
    return "\n".join([*lines, against_1f1b(sheet)])


def against_1f1b(sheet: Sheet) -> str:
    """Where a legal sheet differs from 1F1B, and what that costs or saves."""
    mine, theirs = sheet.table(), one_f_one_b(sheet.num_ranks, sheet.num_microbatches)
    length = Simulation(theirs, SLOT).makespan
    differs = [(rank, next(i for i, (a, b) in enumerate(zip(*rows, strict=True)) if a != b))
               for rank, rows in enumerate(zip(mine.rows, theirs.rows, strict=True)) if rows[0] != rows[1]]  # fmt: skip
    peaks = max(peak_in_flight(mine)), max(peak_in_flight(theirs))
    if not differs:
        later = "" if sheet.num_slots == length else f", but takes {sheet.num_slots} slots instead of {length:g}"
        return f"this is 1F1B, action by action{later}"
    rank, index = differs[0]
    return (
        f"not 1F1B: on rank {rank} action {index + 1} is {mine.rows[rank][index]}, and 1F1B has "
        f"{theirs.rows[rank][index]} there; 1F1B takes {length:g} slots, this {sheet.num_slots}; a rank of 1F1B holds "
        f"at most {peaks[1]}, here {peaks[0]}"
    )


def missing_lines(sheet: Sheet) -> list[str]:
    """What no cell holds, a line a rank."""
    found = []
    for rank in range(sheet.num_ranks):
        absent = [str(action) for action in sheet.missing if action.stage == rank]
        if absent:
            more = "" if len(absent) <= MAX_FAULTS else f" ... and {len(absent) - MAX_FAULTS} more"
            found.append(f"rank {rank}: missing {' '.join(absent[:MAX_FAULTS])}{more}")
    return found


def write_empty(path: Path, num_ranks: int, num_microbatches: int) -> None:
    """Writes a sheet to fill, whole or not at all."""

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="ascii") as file:
            csv.writer(file).writerows(empty_sheet(num_ranks, num_microbatches))

    write_whole(path, write)


def main() -> None:
    """Writes an empty sheet, or checks one."""
    (options,) = parse("python -m step6_schedules.worksheet", __doc__, {SheetOptions: None})
    check_writable("--table", options.table)
    if options.empty:
        if options.sheet.exists():
            raise UsageError(f"{str(options.sheet)!r} is there already, and may be filled; name another file")
        check_writable("FILE.csv", options.sheet)
        write_empty(options.sheet, options.num_ranks, options.num_microbatches or DEFAULT_MICROBATCHES)
        print(f"{options.sheet}: rank r's line takes cells such as 2F0 and 2B0, a slot each. To check it:")
        print(f"python -m step6_schedules.worksheet {options.sheet}")
        return
    sheet = read_sheet(options.sheet, options.num_microbatches)
    print(draw_sheet(sheet))
    print()
    print(verdict(sheet))
    if not sheet.is_legal:
        raise UsageError(
            f"{str(options.sheet)!r} has {counted(len(sheet.faults), 'illegal cell')} and "
            f"{counted(len(sheet.missing), 'missing action')}; mend what is named above"
        )
    if options.table:
        write_csv(sheet.table(), options.table)
        command = torchrun_command("step6_schedules", sheet.num_ranks)
        print(f"train with it: {command} --schedule {options.table} --num-microbatches {sheet.num_microbatches}")


if __name__ == "__main__":
    run_program(main)
