"""The playground's picture, and the sliders that redraw it."""

import io

from step0_monolith.options import UsageError
from step5_orchestrator.costs import Cost, costs
from step5_orchestrator.table import Table
from step6_schedules.choose import TableOptions, named
from step6_schedules.schedules import SCHEDULES
from step6_schedules.timed import predicted
from step6_schedules.timeline import table_figure

MOST_RANKS, MOST_MICROBATCHES, MOST_CHUNKS = 8, 32, 4


def table_for(schedule: str, ranks: int, microbatches: int, chunks: int | None, cost: Cost) -> Table:
    """The table. Raises UsageError, with the reason, where the schedule cannot have it."""
    options = TableOptions(num_chunks=chunks)
    return named(SCHEDULES[schedule], options, ranks, microbatches, cost)


def picture(
    schedule: str = "1f1b",
    ranks: int = 4,
    microbatches: int = 8,
    chunks: int | None = None,
    F: float = 1.0,
    B: float = 2.0,
    W: float = 1.0,
    comm: float = 0.0,
) -> tuple[str, bytes | None]:
    """What there is to say, and the timeline with what each rank holds as a PNG; no picture where there is no table.

    chunks: None: the schedule's own number. F, B: a forward and a whole backward of all layers of a rank, so that an
    action of one of V chunks takes 1/V of it; where the schedule splits the backward, W of it is for the weights and
    the rest for the input. comm: what a message travels.
    """
    try:
        if B <= W:
            raise UsageError(f"B={B:g} is a whole backward and must be longer than its part W={W:g}")
        chunks = chunks or SCHEDULES[schedule].default_chunks
        cost = costs(F, B, B - W, W, comm).scaled(1 / chunks)
        timed = predicted(table_for(schedule, ranks, microbatches, chunks, cost), cost)
    except UsageError as error:
        return f"no such table: {error}", None
    buffer = io.BytesIO()
    table_figure(timed).savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    peaks = " ".join(map(str, timed.peak_in_flight))
    said = f"{schedule}: makespan {timed.makespan:g}, bubble {timed.bubble:.3f}, in flight at most {peaks}"
    return said, buffer.getvalue()


def draw(schedule: str = "1f1b", ranks: int = 4, microbatches: int = 8, **more: float) -> None:
    """Shows the picture below the cell: the plain call, which needs no sliders. See `picture` for what it takes."""
    from IPython.display import Image, display

    said, data = picture(schedule, ranks, microbatches, **more)
    print(said)
    if data is not None:
        display(Image(data))


def playground() -> object | None:
    """Sliders above a picture that follows them; without ipywidgets the picture alone, and how to draw others."""
    try:
        import ipywidgets
    except ImportError:
        print("ipywidgets is not installed: no sliders; call draw('zb-h1', ranks=4, microbatches=8) instead")
        draw()
        return None
    return _build(ipywidgets)


def _build(ipywidgets) -> object:
    from IPython.display import Image, display

    def whole(name: str, value: int, least: int, most: int):
        return ipywidgets.IntSlider(value, least, most, description=name, continuous_update=False)

    def real(name: str, value: float, least: float, most: float):
        return ipywidgets.FloatSlider(value, min=least, max=most, step=0.25, description=name, continuous_update=False)

    controls = {
        "schedule": ipywidgets.Dropdown(options=list(SCHEDULES), value="1f1b", description="schedule"),
        "ranks": whole("ranks", 4, 1, MOST_RANKS),
        "microbatches": whole("microbatches", 8, 1, MOST_MICROBATCHES),
        "chunks": whole("chunks", 1, 1, MOST_CHUNKS),
        "F": real("F", 1.0, 0.25, 4.0),
        "B": real("B", 2.0, 0.5, 8.0),
        "W": real("W", 1.0, 0.25, 4.0),
        "comm": real("comm", 0.0, 0.0, 4.0),
    }
    label = ipywidgets.Label()
    box = ipywidgets.VBox([
        ipywidgets.HBox(list(controls.values())[:4], layout=ipywidgets.Layout(flex_flow="row wrap")),
        ipywidgets.HBox(list(controls.values())[4:], layout=ipywidgets.Layout(flex_flow="row wrap")),
        label,
    ])  # fmt: skip
    display(box)
    handle = display(display_id=True)

    def redraw(change: object = None) -> None:
        label.value, data = picture(**{name: control.value for name, control in controls.items()})
        if data is not None:  # otherwise the last picture stays, and the label says why
            handle.update(Image(data))

    def follow(change: dict) -> None:
        """A schedule brings the chunks that it has."""
        controls["chunks"].value = SCHEDULES[change["new"]].default_chunks

    controls["schedule"].observe(follow, "value")
    for control in controls.values():
        control.observe(redraw, "value")
    redraw()
    box.controls, box.label = controls, label  # for whoever wants to turn them from a cell
    return box
