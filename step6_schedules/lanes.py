"""One axis of a timeline: a lane a rank, a bar an action, and below the bars what the rank holds."""

import statistics
from collections.abc import Sequence

from step5_orchestrator.executor import Event
from step5_orchestrator.table import Table
from step6_schedules.timed import Timed

# From Okabe and Ito's palette, told apart by colour-blind readers; darker from op to op, for grey prints.
COLOURS = {"F": "#9fd6f5", "I": "#e69f00", "W": "#009e73", "B": "#c24f00"}
NAMES = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
LIGHT_TEXT = ("B", "W")
PALEST = 0.5  # how opaque the bars of a rank's last chunk are; those between go from 1 to that
IDLE, HELD, CAP, PATH = "#ececec", "#8a8a8a", "#000000", "#000000"
# In parts of a lane, from its middle: where bars begin, how high they are, and the strip of what is held.
BAR, BAR_HEIGHT, STRIP, STRIP_HEIGHT = -0.46, 0.62, 0.19, 0.26
DIGITS_ACROSS = 120  # of the microbatches' numbers, in the width of a figure


def draw_lanes(axes, timed: Timed, title: str, shown: float, critical_path: bool = False) -> None:
    """Draws what ran when on an axis that shows 0 .. shown. critical_path: with what the length hangs on outlined."""
    table, rows = timed.table, timed.rows
    numbered = _wide_enough(rows, shown)
    top = max([*timed.peak_in_flight, *(timed.caps or ())])
    for rank, row in enumerate(rows):
        axes.barh(rank + BAR, timed.makespan, height=BAR_HEIGHT, align="edge", color=IDLE, zorder=0)
        _draw_actions(axes, table, rank, row)
        _draw_numbers(axes, table, rank, row, numbered)
        _draw_held(axes, timed, rank, top)
    if critical_path:
        _draw_path(axes, timed)
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, shown)
    axes.set_xlabel(f"time ({timed.unit})")
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)  # a file's name may hold a $
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)


def _draw_actions(axes, table: Table, rank: int, row: Sequence[Event]) -> None:
    stages = table.stages_of(rank)
    # An edge of a fixed width would take most of a thin bar, and look like idle time.
    line = 0.5 if len(row) < 120 else 0.0
    for op in table.ops:
        for chunk, stage in enumerate(stages):
            # One collection for all such cells: a bar of its own for each of thousands would take seconds.
            cells = [(a, b - a) for action, a, b in row if action.op == op and action.stage == stage]
            if cells:
                face = (COLOURS[op], opacity(chunk, len(stages)))
                place = (rank + BAR, BAR_HEIGHT)
                axes.broken_barh(cells, place, facecolor=face, edgecolor="white", linewidth=line)


def _draw_numbers(axes, table: Table, rank: int, row: Sequence[Event], numbered: set[str]) -> None:
    first = table.stages_of(rank)[0]
    for action, start, stop in row:
        if action.op in numbered:
            light = action.op in LIGHT_TEXT and action.stage == first
            axes.text(
                (start + stop) / 2, rank + BAR + BAR_HEIGHT / 2, action.microbatch, ha="center",
                va="center_baseline", fontsize=8, color="white" if light else "black",
            )  # fmt: skip


def _draw_held(axes, timed: Timed, rank: int, top: int) -> None:
    """The strip: activations in flight, of at most `top`, with the rank's cap; and its peak in figures beside it."""
    moments, held = zip(*timed.held[rank], strict=True)
    bottom = rank + STRIP + STRIP_HEIGHT
    heights = [bottom - STRIP_HEIGHT * h / top for h in held]
    axes.fill_between(moments, heights, bottom, step="post", facecolor=HELD, linewidth=0)
    peak, cap = timed.peak_in_flight[rank], timed.caps[rank] if timed.caps else None
    if cap is not None:
        level = bottom - STRIP_HEIGHT * cap / top
        axes.plot([0, timed.makespan], [level] * 2, color=CAP, linewidth=0.8, linestyle=(0, (4, 2)))
    text = f" {peak}" if cap is None else f" {peak} of {cap}"
    axes.text(
        1.0,
        rank + STRIP + STRIP_HEIGHT / 2,
        text,
        transform=axes.get_yaxis_transform(),
        fontsize=8,
        va="center",
        ha="left",
    )


def _draw_path(axes, timed: Timed) -> None:
    owners = timed.table.rank_of_stage
    for rank in range(timed.table.num_ranks):
        cells = [(timed.times[a][0], timed.times[a][1] - timed.times[a][0]) for a in timed.critical_path
                 if owners[a.stage] == rank]  # fmt: skip
        if cells:
            axes.broken_barh(cells, (rank + BAR, BAR_HEIGHT), facecolor="none", edgecolor=PATH, linewidth=1.3)
    middle = BAR + BAR_HEIGHT / 2
    for a, b in zip(timed.critical_path, timed.critical_path[1:], strict=False):
        ends = owners[a.stage], owners[b.stage]
        if ends[0] != ends[1]:
            sign = 1 if ends[1] > ends[0] else -1
            axes.plot(
                [timed.times[a][1], timed.times[b][0]],
                [ends[0] + middle + sign * BAR_HEIGHT / 2, ends[1] + middle - sign * BAR_HEIGHT / 2],
                color=PATH, linewidth=1.3,
            )  # fmt: skip


def opacity(chunk: int, num_chunks: int) -> float:
    """How opaque the bars of one of a rank's chunks are."""
    return 1.0 - (1.0 - PALEST) * chunk / max(1, num_chunks - 1)


def add_legend(figure, timed: Timed, critical_path: bool = False) -> None:
    """Names the colours, below everything."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    table = timed.table
    entries = [Patch(facecolor=COLOURS[op], label=NAMES[op]) for op in table.ops]
    if table.num_stages > table.num_ranks:
        entries.append(Patch(facecolor=("#555555", PALEST), label="paler from chunk to chunk"))
    entries.append(Patch(facecolor=IDLE, label="idle"))
    entries.append(Patch(facecolor=HELD, label="activations in flight (right: the most)"))
    if timed.caps:
        entries.append(Line2D([], [], color=CAP, linewidth=0.8, linestyle=(0, (4, 2)), label="cap"))
    if critical_path:
        entries.append(Patch(facecolor="none", edgecolor=PATH, linewidth=1.3, label="critical path"))
    figure.legend(handles=entries, loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _wide_enough(rows: Sequence[Sequence[Event]], end: float) -> set[str]:
    """The ops whose cells are wide enough for their microbatch's number: all of them get one, or none."""
    longest = max(len(str(event.action.microbatch)) for row in rows for event in row)
    widths: dict[str, list[float]] = {}
    for row in rows:
        for action, start, stop in row:
            widths.setdefault(action.op, []).append(stop - start)
    return {op for op, found in widths.items() if statistics.median(found) / end > longest / DIGITS_ACROSS}
