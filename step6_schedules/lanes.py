"""One axis of a timeline: a lane a rank, a bar an action."""

import statistics
from collections.abc import Sequence

from step5_orchestrator.executor import Event
from step5_orchestrator.table import Table

# From Okabe and Ito's palette, told apart by colour-blind readers; darker from op to op, for grey prints.
COLOURS = {"F": "#9fd6f5", "I": "#e69f00", "W": "#009e73", "B": "#c24f00"}
NAMES = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
LIGHT_TEXT = ("B", "W")
LATER_CHUNK = 0.55  # how opaque the bars of a rank's later chunks are


def draw_lanes(axes, table: Table, rows: Sequence[Sequence[Event]], title: str, label: str, shown: float) -> None:
    """Draws events, a list a rank in running order, on an axis that shows 0 .. shown."""
    end = max(row[-1].end for row in rows)
    numbered = _wide_enough(rows, shown)
    for rank, row in enumerate(rows):
        axes.barh(rank, end, height=0.8, color="#eeeeee", zorder=0)
        first = table.stages_of(rank)[0]
        line = min(0.5, 60 / len(row))
        for op in table.ops:
            for is_later in (False, True):
                # One collection for all such cells: a bar of its own for each of thousands would take seconds.
                cells = [(a, b - a) for action, a, b in row if action.op == op and (action.stage != first) == is_later]
                if cells:
                    face = (COLOURS[op], LATER_CHUNK if is_later else 1.0)
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
    axes.invert_yaxis()
    axes.set_xlim(0, shown)
    axes.set_xlabel(label)
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)


def add_legend(figure, table: Table) -> None:
    """Names the colours, below everything."""
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=COLOURS[op], label=NAMES[op]) for op in table.ops]
    if table.num_stages > table.num_ranks:
        entries.append(Patch(facecolor=("#555555", LATER_CHUNK), label="paler: a rank's later chunks"))
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
