"""A table as text: cells in columns, and the ones that an error is about marked."""

from collections.abc import Sequence

from step5_orchestrator.table import Table

WIDTH = 80
GAP = " ..."


def marked_rows(table: Table, places: Sequence[tuple[int, int]] = (), width: int = WIDTH) -> str:
    """The rows in running order, `>2B3<` around each marked place (rank, index).

    A row that does not fit shows the cells around its marks, or where others have theirs; `...` stands for what is left
    out.
    """
    marked = set(places)
    cells = [
        [f">{action}<" if (rank, i) in marked else f" {action} " for i, action in enumerate(row)]
        for rank, row in enumerate(table.rows)
    ]
    cell = max((len(text) for row in cells for text in row), default=1)
    label = len(f"rank {len(cells) - 1}: ")
    first = min((i for _, i in marked), default=0)
    lines = []
    for rank, row in enumerate(cells):
        marks = sorted(i for r, i in marked if r == rank) or [min(first, len(row) - 1)]
        shown = _shown(len(row), marks, width - label, cell)
        parts, previous = [], -1
        for index in shown:
            parts += [GAP + " "] if index > previous + 1 else []
            parts += row[index].ljust(cell)
            previous = index
        parts += [GAP] if previous < len(row) - 1 else []
        lines.append((f"rank {rank}:".ljust(label) + "".join(parts)).rstrip())
    return "\n".join(lines)


def _shown(length: int, marks: Sequence[int], width: int, cell: int) -> list[int]:
    """The cells of a row to show: all where they fit, else as many around each mark as do."""
    if length * cell <= width:
        return list(range(length))
    around: list[int] = []
    for count in range(1, length):
        windows = [range(max(0, m - (count - 1) // 2), min(length, m + count // 2 + 1)) for m in marks]
        wider = sorted({i for window in windows for i in window})
        gaps = sum(b > a + 1 for a, b in zip([-1, *wider], [*wider, length], strict=True))
        if len(wider) * cell + gaps * (len(GAP) + 1) > width:
            break
        around = wider
    return around or list(marks[:1])
