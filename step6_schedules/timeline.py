"""The timeline picture: what the table predicts above what the run measured."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from step0_monolith.files import write_whole
from step0_monolith.options import Options, option, optional, output_file
from step5_orchestrator.costs import Cost
from step5_orchestrator.executor import Event
from step5_orchestrator.prediction import bubble, peak_in_flight, timing
from step5_orchestrator.table import Table

# Blue and orange of Okabe and Ito's palette, told apart by colour-blind readers; B is also darker, for grey prints.
COLOURS = {"F": "#56b4e9", "B": "#d55e00"}
NAMES = {"F": "forward", "B": "backward"}


@dataclass(frozen=True)
class TimelineOptions(Options):
    """Where the picture goes."""

    timeline: Path | None = option(
        None, optional(output_file(".png", ".svg")), "file for a picture of one iteration, predicted above measured"
    )


def predicted_events(table: Table, cost: Cost) -> list[list[Event]]:
    """The table's own timing as one list of events a rank, in the unit of the costs."""
    times = timing(table, cost)
    return [[Event(action, *times[action]) for action in row] for row in table.rows]


def draw_timeline(
    path: Path, table: Table, cost: Cost, measured: Sequence[Sequence[Event]], unit: str, note: str = ""
) -> None:
    """Writes the picture; needs no display.

    cost: of F and B, in `unit`, for the predicted half. measured: one iteration's events, a list a rank, in seconds.
    note: words for the title of the measured half, such as how it was measured.
    """
    from matplotlib.figure import Figure  # imported late: only rank 0 draws, and the import takes a second

    start = min(events[0].start for events in measured)
    in_ms = [[Event(e.action, (e.start - start) * 1e3, (e.end - start) * 1e3) for e in row] for row in measured]
    predicted = predicted_events(table, cost)
    height = 1.6 + 2 * (0.32 * table.num_ranks + 0.55)
    figure = Figure(figsize=(11, height), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    peaks = " ".join(map(str, peak_in_flight(table)))
    title = f"predicted: {table.name}, bubble {bubble(table, cost):.3f}, peak in flight {peaks}"
    wall, planned = (max(row[-1].end for row in rows) for rows in (in_ms, predicted))
    # In one unit both halves have one axis, so that what took longer shows.
    shown = [max(wall, planned)] * 2 if unit == "ms" else [planned, wall]
    _draw(upper, predicted, title, f"time ({unit})", shown[0])
    upper.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8, borderaxespad=0)
    busy = sum(event.end - event.start for row in in_ms for event in row)
    share = 1 - busy / (len(in_ms) * wall)
    _draw(lower, in_ms, f"measured: bubble {share:.3f}{' ' + note if note else ''}", "time (ms)", shown[1])
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=130))


def _draw(axes, rows: Sequence[Sequence[Event]], title: str, label: str, shown: float) -> None:
    end = max(row[-1].end for row in rows)
    numbered = _wide_enough(rows, shown)
    for rank, row in enumerate(rows):
        axes.barh(rank, end, height=0.8, color="#eeeeee", zorder=0)
        for op, colour in COLOURS.items():
            # One collection a rank and op: a bar of its own for each of thousands of cells would take seconds.
            cells = [(start, stop - start) for action, start, stop in row if action.op == op]
            name = NAMES[op] if rank == 0 else None
            line = min(0.5, 60 / len(row))
            axes.broken_barh(cells, (rank - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=line, label=name)
        for action, start, stop in row:
            if action.op in numbered:
                colour, middle = ("white" if action.op == "B" else "black"), (start + stop) / 2
                axes.text(middle, rank, action.microbatch, ha="center", va="center", fontsize=8, color=colour)
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.invert_yaxis()
    axes.set_xlim(0, shown)
    axes.set_xlabel(label)
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)


def _wide_enough(rows: Sequence[Sequence[Event]], end: float) -> set[str]:
    """The ops whose cells are wide enough for their microbatch's number: all of them get one, or none."""
    longest = max(len(str(event.action.microbatch)) for row in rows for event in row)
    widths: dict[str, list[float]] = {}
    for row in rows:
        for action, start, stop in row:
            widths.setdefault(action.op, []).append(stop - start)
    # About 120 digits fit across the figure.
    return {op for op, found in widths.items() if statistics.median(found) / end > longest / 120}
