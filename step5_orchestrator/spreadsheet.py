"""Tables as spreadsheets."""

from pathlib import Path

from step5_orchestrator.actions import parse_action
from step5_orchestrator.table import Table, make_table


def read_csv(path: Path, num_ranks: int | None = None, num_microbatches: int | None = None) -> Table:
    """The table in a CSV file."""
    rows = [[parse_action(c) for c in line.split(",") if c] for line in path.read_text().splitlines()]
    return make_table(path.name, rows)


def write_csv(table: Table, path: Path) -> None:
    """Writes a table."""
    path.write_text("\n".join(",".join(table.cells(r)) for r in range(table.num_ranks)))
