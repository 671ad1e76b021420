"""One axis of a timeline: a lane a rank, a bar an action."""

import statistics
from collections.abc import Sequence

from step5_orchestrator.executor import Event
from step5_orchestrator.table import Table

# From Okabe and Ito's palette, told apart by colour-blind readers; darker from op to op, for grey prints.
COLOURS = {"F": "#9fd6f5", "I": "#e69f00", "W": "#009e73", "B": "#c24f00"}
NAMES = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
LIGHT_TEXT = ("B", "W")
PALEST = 0.5  # how opaque the bars of a rank's last chunk are; those between go from 1 to that


def draw_lanes(axes, table: Table, rows: Sequence[Sequence[Event]], title: str, label: str, shown: float) -> None:
    """Draws events, a list a rank in running order, on an axis that shows 0 .. shown."""
    end = max(row[-1].end for row in rows)
    numbered = _wide_enough(rows, shown)
    for rank, row in enumerate(rows):
        axes.barh(rank, end, height=0.8, color="#eeeeee", zorder=0)
        stages = table.stages_of(rank)
        first = stages[0]
        # An edge of a fixed width would take most of a thin bar, and look like idle time.
        line = 0.5 if len(row) < 120 else 0.0
        for op in table.ops:
            for chunk, stage in enumerate(stages):
                # One collection for all such cells: a bar of its own for each of thousands would take seconds.
                cells = [(a, b - a) for action, a, b in row if action.op == op and action.stage == stage]
                if cells:
                    face = (COLOURS[op], _opacity(chunk, len(stages)))
                    axes.broken_barh(cells, (rank - 0.4, 0.8), facecolor=face, edgecolor="white", linewidth=line)
        for action, start, stop in row:
            if action.op in numbered:
                light = action.op in LIGHT_TEXT and action.stage == first
                middle = (start + stop) / 2
                axes.text(
                    middle, rank, action.microbatch, ha="center", va="center", fontsize=8,
                    color="white" if light else "black",
                )  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, shown)
    axes.set_xlabel(label)
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)  # a file's name may hold a $
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)


def _opacity(chunk: int, num_chunks: int) -> float:
    return 1.0 - (1.0 - PALEST) * chunk / max(1, num_chunks - 1)


def add_legend(figure, table: Table) -> None:
    """Names the colours, below everything."""
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=COLOURS[op], label=NAMES[op]) for op in table.ops]
    if table.num_stages > table.num_ranks:
        entries.append(Patch(facecolor=("#555555", PALEST), label="paler from chunk to chunk"))
    figure.legend(handles=entries, loc="outside lower center", ncols=5, frameon=False, fontsize=8)


def _wide_enough(rows: Sequence[Sequence[Event]], end: float) -> set[str]:
    """The ops whose cells are wide enough for their microbatch's number: all of them get one, or none."""
    longest = max(len(str(event.action.microbatch)) for row in rows for event in row)
    widths: dict[str, list[float]] = {}
    for row in rows:
        for action, start, stop in row:
            widths.setdefault(action.op, []).append(stop - start)
    # About 120 digits fit across the figure.
    return {op for op, found in widths.items() if statistics.median(found) / end > longest / 120}
