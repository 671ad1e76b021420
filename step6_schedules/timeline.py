"""The timeline as a figure: what the table predicts above what the run measured, on one axis."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from step0_monolith.files import write_whole
from step5_orchestrator.costs import Cost, costs
from step5_orchestrator.executor import Event
from step5_orchestrator.table import Table
from step6_schedules.lanes import add_legend, draw_lanes
from step6_schedules.timed import Timed, predicted

WIDTH, DPI = 11.0, 130  # inches, dots an inch
AROUND = 1.05  # inches for title, axis and legend


def cost_of_run(events: Sequence[Sequence[Event]]) -> Cost:
    """What an action of each op took in the run: the median in milliseconds, in three digits; messages cost nothing."""
    found: dict[str, list[float]] = {}
    for row in events:
        for action, start, end in row:
            found.setdefault(action.op, []).append((end - start) * 1e3)
    return costs(**{op: float(f"{max(statistics.median(times), 1e-6):.3g}") for op, times in found.items()})


def table_figure(timed: Timed, critical_path: bool = False):
    """A matplotlib Figure of one timeline; needs no display."""
    figure = _figure(timed.table.num_ranks, 1)
    draw_lanes(figure.subplots(), timed, title_of(timed), timed.makespan, critical_path)
    add_legend(figure, timed, critical_path)
    return figure


def run_figure(planned: Timed, ran: Timed, critical_path: bool = False):
    """A matplotlib Figure of a prediction above what was measured; in one unit both have one axis."""
    figure = _figure(ran.table.num_ranks, 2)
    upper, lower = figure.subplots(2, 1)
    shown = [planned.makespan, ran.makespan]
    if planned.unit == ran.unit:
        shown = [max(shown)] * 2  # so that what took longer shows
    for axes, timed, end in zip((upper, lower), (planned, ran), shown, strict=True):
        draw_lanes(axes, timed, title_of(timed), end, critical_path)
    add_legend(figure, ran, critical_path)
    return figure


def save(figure, path: Path) -> None:
    """Writes a figure whole or not at all. Raises RunError when the disk refuses."""
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=DPI))


def draw_table(path: Path, table: Table, cost: Cost, caps: Sequence[int] | None = None, path_too: bool = False) -> None:
    """Writes the picture of a table's own timing."""
    save(table_figure(predicted(table, cost, "unit of the costs", caps), path_too), path)


def title_of(timed: Timed) -> str:
    """What kind of timeline it is, and its numbers in words."""
    name = timed.table.name
    how = "measured" if timed.cost is None else f"predicted with {timed.cost.text(timed.table.ops)}"
    what = f" {timed.note}" if timed.note else ""
    unit = f" {timed.unit}" if timed.unit in ("ms", "slots") else ""
    most = max(timed.peak_in_flight)
    return (
        f"{name}, {how}{what}: makespan {timed.makespan:.4g}{unit}, bubble {timed.bubble:.3f}, at most {most} in flight"
    )


def _figure(num_ranks: int, panels: int):
    from matplotlib.figure import Figure  # imported late: only one rank draws, and the import takes a second

    lane = 0.52 if num_ranks <= 8 else 0.40
    return Figure(figsize=(WIDTH, 0.7 + panels * (lane * num_ranks + AROUND)), layout="constrained")
