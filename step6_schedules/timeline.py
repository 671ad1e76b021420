"""The timeline picture: what the table predicts above what the run measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from step0_monolith.files import write_whole
from step0_monolith.options import Options, option, optional, output_file
from step5_orchestrator.costs import Cost
from step5_orchestrator.executor import Event
from step5_orchestrator.prediction import bubble, peak_in_flight, timing
from step5_orchestrator.table import Table
from step6_schedules.lanes import add_legend, draw_lanes


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

    cost: in `unit`, for the predicted half. measured: one iteration's events, a list a rank, in seconds.
    note: words for the title of the measured half, such as how it was measured.
    """
    from matplotlib.figure import Figure  # imported late: only rank 0 draws, and the import takes a second

    start = min(events[0].start for events in measured)
    in_ms = [[Event(e.action, (e.start - start) * 1e3, (e.end - start) * 1e3) for e in row] for row in measured]
    predicted = predicted_events(table, cost)
    height = 1.6 + 2 * (0.32 * table.num_ranks + 0.55)
    figure = Figure(figsize=(11, height), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    title = f"predicted: {_predicted_title(table, cost)}"
    wall, planned = (max(row[-1].end for row in rows) for rows in (in_ms, predicted))
    # In one unit both halves have one axis, so that what took longer shows.
    shown = [max(wall, planned)] * 2 if unit == "ms" else [planned, wall]
    draw_lanes(upper, table, predicted, title, f"time ({unit})", shown[0])
    add_legend(figure, table)
    busy = sum(event.end - event.start for row in in_ms for event in row)
    share = 1 - busy / (len(in_ms) * wall)
    found = f"measured: bubble {share:.3f}{' ' + note if note else ''}"
    draw_lanes(lower, table, in_ms, found, "time (ms)", shown[1])
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=130))


def draw_table(path: Path, table: Table, cost: Cost, unit: str = "unit of the costs") -> None:
    """Writes the picture of a table's own timing."""
    from matplotlib.figure import Figure

    events = predicted_events(table, cost)
    figure = Figure(figsize=(11, 1.5 + 0.32 * table.num_ranks), layout="constrained")
    end = max(row[-1].end for row in events)
    draw_lanes(figure.subplots(), table, events, _predicted_title(table, cost), f"time ({unit})", end)
    add_legend(figure, table)
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=130))


def _predicted_title(table: Table, cost: Cost) -> str:
    found = peak_in_flight(table)
    peaks = " ".join(map(str, found)) if len(found) <= 16 else f"at most {max(found)}"
    return f"{table.name}, bubble {bubble(table, cost):.3f}, peak in flight {peaks}"
