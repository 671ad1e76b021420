"""The report's pictures: bars of iteration time and of CPU work, and emulated devices against their goals."""

from collections.abc import Sequence
from pathlib import Path

from step0_monolith.files import write_whole
from step6_schedules.lanes import COLOURS
from step6_schedules.measure.figures import Figure
from step6_schedules.measure.iterations import BY_HAND, LIBRARYS, MONOLITH, OURS
from step6_schedules.measure.program import SIZES
from step6_schedules.measure.report import Picture, Report
from step6_schedules.measure.rounds import Spread, spread

TIME = "iteration time, ours / library"
WORK = "CPU seconds of all ranks / monolith"
# Who is shown, from left to right, and the colour: told apart by colour-blind readers.
BARS = {OURS: COLOURS["B"], BY_HAND: COLOURS["I"], LIBRARYS: COLOURS["F"], MONOLITH: "#777777"}
NAMES = {OURS: "this course", LIBRARYS: "torch.distributed.pipelining", BY_HAND: "by hand, nothing checked"}
DPI = 110


def draw(report: Report, folder: Path) -> list[Picture]:
    """Writes the pictures that the report has figures for; needs no display. Raises RunError when the disk refuses."""
    found = []
    for size in SIZES:
        if figures := [f for f in report.figures if f.family == TIME and _split(f)[1] == size]:
            found.append(Picture("iterations", f"bench_{size}.png", f"Time of one iteration, {size}"))
            _draw_times(folder / found[-1].file, figures, size)
    if figures := [f for f in report.figures if f.family == WORK]:
        found.append(Picture("iterations", "bench_work.png", "CPU seconds of all ranks over those of the monolith"))
        _draw_work(folder / found[-1].file, figures)
    emulated = [f for run in report.runs if run.family == "emulated" for f in run.figures if f.goal is not None]
    if emulated:
        found.append(Picture("emulated", "bench_emulated.png", "Emulated devices: measured time over the table's"))
        _draw_emulated(folder / found[-1].file, emulated)
    return found


def _split(figure: Figure) -> tuple[str, str]:
    """The schedule, and the rest of the case: its size, or the numbers of ranks and microbatches."""
    schedule, _, rest = figure.case.partition(", ")
    return schedule, rest


def _draw_times(path: Path, figures: Sequence[Figure], size: str) -> None:
    from matplotlib.figure import Figure as Canvas  # imported late, as in timeline.py: it takes a second

    canvas = Canvas(figsize=(2.2 + 1.3 * max(4, len(figures)), 4), layout="constrained")
    axes = canvas.subplots()
    _bars(axes, [{who: spread(f.samples[who]) for who in BARS if who in f.samples} for f in figures])
    width, layers, rows, microbatches = SIZES[size]
    sizes = f"{size}: width {width}, {layers} layers, {rows} rows in {microbatches} microbatches"
    axes.set_title(sizes, loc="left", fontsize=10)
    axes.set_ylabel("ms an iteration (median, quartiles)")
    _finish(axes, [_split(f)[0] for f in figures])
    _legend(canvas, axes)
    write_whole(path, lambda temporary: canvas.savefig(temporary, dpi=DPI))


def _draw_work(path: Path, figures: Sequence[Figure]) -> None:
    from matplotlib.figure import Figure as Canvas

    sizes = [size for size in SIZES if any(_split(f)[1] == size for f in figures)]
    canvas = Canvas(figsize=(9, 0.9 + 2.6 * len(sizes)), layout="constrained")
    for axes, size in zip(canvas.subplots(len(sizes), squeeze=False)[:, 0], sizes, strict=True):
        own = [f for f in figures if _split(f)[1] == size]
        groups = []
        for f in own:
            beside = {who: Spread(f.beside[who], f.beside[who], f.beside[who]) for who in BARS if who in f.beside}
            groups.append({OURS: Spread(f.value, *(f.spread or (f.value, f.value))), **beside})
        for f, left in zip(own, _bars(axes, groups), strict=True):
            if f.goal is not None:
                ends = (left - 0.15, left + 0.15)
                axes.plot(ends, (f.goal, f.goal), color="black", linewidth=2, label="goal, at most")
        axes.axhline(1, color="#777777", linewidth=1, linestyle=":", label="the monolith")
        axes.set_title(size, loc="left", fontsize=10)
        axes.set_ylabel("times the monolith's")
        _finish(axes, [_split(f)[0] for f in own])
    canvas.suptitle("CPU seconds of all ranks (median, quartiles)", fontsize=11)
    _legend(canvas, canvas.axes[0])
    write_whole(path, lambda temporary: canvas.savefig(temporary, dpi=DPI))


def _draw_emulated(path: Path, figures: Sequence[Figure]) -> None:
    from matplotlib.figure import Figure as Canvas

    cases = list(dict.fromkeys(_split(f)[1] for f in figures))
    names = list(dict.fromkeys(_split(f)[0] for f in figures))
    rows = -(-len(cases) // 2)
    canvas = Canvas(figsize=(10, 1.2 + rows * (0.9 + 0.26 * len(names))), layout="constrained")
    grid = canvas.subplots(rows, min(2, len(cases)), sharex=True, sharey=True, squeeze=False).flatten()
    for axes, case in zip(grid, cases, strict=False):
        own = {names.index(_split(f)[0]): f for f in figures if _split(f)[1] == case}
        axes.vlines(
            [f.goal for f in own.values()], [y - 0.4 for y in own], [y + 0.4 for y in own], color="black",
            linewidth=2, label="goal, at most",
        )  # fmt: skip
        for y, f in own.items():
            low, high = f.spread or (f.value, f.value)
            axes.plot([low, high], [y, y], color=BARS[OURS], linewidth=1.5)
        values = [f.value for f in own.values()]
        axes.plot(values, list(own), "o", color=BARS[OURS], markersize=6, label=NAMES[OURS])
        theirs = {y: f.beside[LIBRARYS] for y, f in own.items() if LIBRARYS in f.beside}
        if theirs:
            axes.plot(
                list(theirs.values()),
                list(theirs),
                "D",
                color="#4a90b8",
                mfc="white",
                markersize=5,
                label=NAMES[LIBRARYS],
            )
        axes.set_title(case, loc="left", fontsize=10)
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(labelbottom=True)
    for axes in grid[len(cases) :]:
        axes.set_visible(False)
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    grid[0].set_xlim(left=min(1.0, grid[0].get_xlim()[0]))
    canvas.suptitle("Measured makespan over the table's own: 1 where nothing is lost (median, quartiles)", fontsize=11)
    _legend(canvas, grid[0])
    write_whole(path, lambda temporary: canvas.savefig(temporary, dpi=DPI))


def _bars(axes, groups: Sequence[dict[str, Spread]]) -> list[float]:
    """A group of bars a schedule, of those who have run it; returns where the first of each group stands."""
    firsts = []
    for place, group in enumerate(groups):
        who = [name for name in BARS if name in group]
        firsts.append(place - 0.1 * (len(who) - 1))
        for number, name in enumerate(who):
            median, low, high = group[name]
            whisker = {"yerr": [[median - low], [high - median]]} if high > low else {}
            axes.bar(
                firsts[-1] + 0.2 * number, median, width=0.2, color=BARS[name], edgecolor="white", linewidth=0.5,
                label=NAMES.get(name, name), error_kw={"linewidth": 1, "capsize": 2}, **whisker,
            )  # fmt: skip
    return firsts


def _finish(axes, schedules: Sequence[str]) -> None:
    axes.set_xticks(range(len(schedules)), schedules)
    axes.set_xlim(-0.7, len(schedules) - 0.3)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(canvas, axes) -> None:
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    canvas.legend(entries.values(), entries, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
