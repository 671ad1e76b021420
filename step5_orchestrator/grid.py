"""A table as text: cells in columns, and the ones that an error is about marked."""

from collections.abc import Sequence

from step5_orchestrator.table import Table

WIDTH = 80


def marked_rows(table: Table, places: Sequence[tuple[int, int]] = (), width: int = WIDTH) -> str:
    """The rows in running order, `>2B3<` around each marked place (rank, index).

    Rows that do not fit are cut around the first mark; `...` stands for what is left out.
    """
    marked = set(places)
    rows = [
        [f">{action}<" if (rank, i) in marked else f" {action} " for i, action in enumerate(row)]
        for rank, row in enumerate(table.rows)
    ]
    cell = max((len(text) for row in rows for text in row), default=1)
    label = len(f"rank {len(rows) - 1}: ")
    fits = max(1, (width - label - 8) // cell)
    longest = max(map(len, rows), default=0)
    middle = min((index for _, index in places), default=0)
    start = max(0, min(middle - fits // 2, longest - fits))
    lines = []
    for rank, row in enumerate(rows):
        shown = "".join(text.ljust(cell) for text in row[start : start + fits])
        before, after = ("... " if start else ""), (" ..." if len(row) > start + fits else "")
        lines.append(f"{f'rank {rank}:'.ljust(label)}{before}{shown.rstrip()}{after}")
    return "\n".join(lines)
