"""Tables as CSV, for spreadsheet programs and in the compute-only format of torch.distributed.pipelining.

A line a rank, a cell an action in running order, such as `2F0`; a pair is one cell, `(2F4;5B1)OVERLAP_F_B`. Blank cells
are idle slots; only the order counts when a table is read.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from step0_monolith.files import write_whole
from step0_monolith.options import UsageError
from step5_orchestrator.actions import Action, Value, is_given, makes, needs
from step5_orchestrator.cells import Place, read_cell, shown
from step5_orchestrator.collector import paused_collector
from step5_orchestrator.csv_file import records
from step5_orchestrator.table import Table, TableError, make_table
from step5_orchestrator.words import printable

MAX_COLUMNS = 16_384  # what spreadsheet programs can show


@paused_collector()
def read_csv(path: Path | str, num_ranks: int | None = None, num_microbatches: int | None = None) -> Table:
    """The table in a CSV file, named as the file is.

    Takes what spreadsheet programs write (see `csv_file.records`), blank cells anywhere, and blank lines at the end.
    num_ranks, num_microbatches: of the run, where they are known. Raises UsageError with row, column and text of the
    cell for what is no action, occurs twice or is out of range; also for a rank without actions, another number of rows
    than ranks, and a file that cannot be read. Whether the table can run is for `legality.check` to say.
    """
    path = Path(path)
    rows: list[list[Action]] = []
    pairs: list[Action] = []
    places: dict[Action, Place] = {}
    blank_lines = 0
    for cells in records(path):
        row: list[Action] = []
        for column, text in enumerate(cells):
            if not text:
                continue
            place = Place(len(rows) + blank_lines, column)
            try:
                actions = read_cell(text)
            except ValueError as error:
                raise UsageError(f"{str(path)!r}: {place} holds {shown(text)}: {error}") from None
            for action in actions:
                if action in places:
                    first = places[action].name
                    raise _refused(
                        path,
                        [*rows, [*row, *actions]],
                        action,
                        f"{place} holds {action}, and so does {first}: every action runs once; correct one of them, or "
                        f"delete it",
                    )
                places[action] = place
            if len(actions) == 2:
                pairs.append(actions[0])
            row += actions
        if row and blank_lines:
            raise UsageError(
                f"{str(path)!r}: row {len(rows) + 1} has no action in any column, and it is rank {len(rows)}'s; fill "
                f"it, or delete the line"
            )
        if row:
            rows.append(row)
        else:
            blank_lines += 1
    _check_rows(path, len(rows), num_ranks)
    _check_range(path, rows, places, num_microbatches)
    return make_table(printable(path.name), rows, pairs)


def _check_rows(path: Path, num_rows: int, num_ranks: int | None) -> None:
    if num_rows == 0:
        raise UsageError(f"{str(path)!r} holds no action; write a line for each rank, with cells such as 2F0")
    if num_ranks is not None and num_rows != num_ranks:
        raise UsageError(
            f"{str(path)!r} has {num_rows} row{'s' if num_rows > 1 else ''}, but {num_ranks} "
            f"rank{'s run' if num_ranks > 1 else ' runs'}: a table has a row for each rank; run it with {num_rows}"
        )


def _refused(path: Path, rows: Sequence[Sequence[Action]], action: Action, message: str) -> TableError:
    """The error, with the rows read so far and the places of the action in them."""
    places = [(rank, i) for rank, row in enumerate(rows) for i, other in enumerate(row) if other == action]
    error = TableError(f"{str(path)!r}: {message}", places)
    error.table = make_table(printable(path.name), rows)
    return error


def _check_range(
    path: Path, rows: Sequence[Sequence[Action]], places: Mapping[Action, Place], num_microbatches: int | None
) -> None:
    top = max(places, key=lambda action: action.stage)
    last = max(places, key=lambda action: action.microbatch)
    # With one wrong digit, looking for what is missing would count through stages or microbatches that nobody meant.
    num_stages, count = top.stage + 1, last.microbatch + 1
    if num_stages * count > 2 * len(places):
        named_stages, named = len({action.stage for action in places}), len({action.microbatch for action in places})
        wrong = top if num_stages * named > count * named_stages else last
        raise _refused(
            path,
            rows,
            wrong,
            f"{places[wrong]} holds {wrong}, but stages 0..{top.stage} with microbatches 0..{last.microbatch} take at "
            f"least {2 * num_stages * count} actions, and the table has {len(places)}; correct the number, or add what "
            f"is missing",
        )
    if num_microbatches is not None and count > num_microbatches:
        wrong = next(action for action in places if action.microbatch >= num_microbatches)
        raise _refused(
            path,
            rows,
            wrong,
            f"{places[wrong]} holds {wrong}, but microbatches are 0..{num_microbatches - 1}; correct the cell, or run "
            f"the table with {count} microbatches",
        )


def write_csv(table: Table, path: Path | str) -> None:
    """Writes a table so that `read_csv` and torch.distributed.pipelining read it; the file appears whole or not at all.

    As in that library's own files, a cell lies in the column of its time when every cell takes one slot, and idle slots
    are blank. Where that takes more columns than spreadsheet programs have, or the rows cannot run, a rank's cells
    follow each other without blanks. Raises RunError when the disk refuses.
    """
    rows = [table.cells(rank) for rank in range(table.num_ranks)]
    columns = _columns(table)
    if columns is not None:
        rows = [_spread(cells, places) for cells, places in zip(rows, columns, strict=True)]

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="ascii") as file:
            csv.writer(file).writerows(rows)

    write_whole(Path(path), write)


def _spread(cells: Sequence[str], columns: Sequence[int]) -> list[str]:
    spread = [""] * (columns[-1] + 1 if columns else 0)
    for cell, column in zip(cells, columns, strict=True):
        spread[column] = cell
    return spread


@paused_collector()
def _columns(table: Table) -> list[list[int]] | None:
    """For each rank the columns of its cells: every cell takes one slot, and starts once all of it can.

    None when the rows never end that way, or need too many columns. Linear in the number of actions.
    """
    cells = [_grouped(table, rank) for rank in range(table.num_ranks)]
    columns: list[list[int]] = [[] for _ in cells]
    num_stages = table.num_stages
    ready: dict[Value, int] = {}
    waiting: dict[Value, int] = {}
    runnable = list(range(table.num_ranks))
    while runnable:
        rank = runnable.pop()
        own, places = cells[rank], columns[rank]
        while len(places) < len(own):
            cell = own[len(places)]
            made = [value for action in cell for value in makes(action)]
            needed = [v for action in cell for v in needs(action) if v not in made and not is_given(v, num_stages)]
            column = places[-1] + 1 if places else 0
            missing = None
            for value in needed:
                if value in ready:
                    column = max(column, ready[value])
                else:
                    missing = value
            if missing is not None:
                waiting[missing] = rank
                break
            if column >= MAX_COLUMNS:
                return None
            places.append(column)
            for value in made:
                ready[value] = column + 1
                if value in waiting:
                    runnable.append(waiting.pop(value))
    ended = all(len(places) == len(own) for places, own in zip(columns, cells, strict=True))
    return columns if ended else None


def _grouped(table: Table, rank: int) -> list[tuple[Action, ...]]:
    """A rank's actions, those of a pair together: one entry for each of `Table.cells`."""
    groups: list[tuple[Action, ...]] = []
    row = iter(table.rows[rank])
    for action in row:
        second = next(row, None) if action in table.pairs else None
        groups.append((action,) if second is None else (action, second))
    return groups
