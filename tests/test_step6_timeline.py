"""Step 6: timelines as pictures: what they show, at every size, for every reader, by one rank without a display."""

import itertools
import os

import pytest
from matplotlib.colors import to_rgb
from matplotlib.transforms import Bbox
from PIL import Image

from step0_monolith.options import UsageError
from step0_monolith.train import ResultOptions
from step2_comms.launch import Launch
from step5_orchestrator.actions import Action
from step5_orchestrator.costs import UNIT_COST, costs
from step5_orchestrator.executor import Event
from step5_orchestrator.prediction import peak_in_flight
from step5_orchestrator.program import check_outputs
from step6_schedules.lanes import COLOURS, IDLE
from step6_schedules.schedules import SCHEDULES
from step6_schedules.timed import measured, predicted
from step6_schedules.timeline import cost_of_run, run_figure, save, table_figure
from step6_schedules.views import ViewOptions
from tests.ranks import torchrun


def events_of(table, cost, slower: float = 1.0) -> list[list[Event]]:
    """Events in seconds as a run would have them if it went as predicted, 7 s after its clock's zero."""
    rows = predicted(table, cost).rows
    return [[Event(e.action, 7 + slower * e.start / 1e3, 7 + slower * e.end / 1e3) for e in row] for row in rows]


PICTURES = [("naive", 1, 1), ("1f1b", 2, 2), ("dualpipe-v", 4, 8), ("zb-v", 3, 4), ("interleaved", 16, 64)]


@pytest.mark.parametrize(("schedule", "p", "m"), PICTURES)
def test_the_picture_at_every_size(tmp_path, schedule, p, m):
    """Nothing is cut off or lies over something else, and numbers vanish where cells are too narrow."""
    table, cost = SCHEDULES[schedule](p, m), costs(5.0, 7.0, 4.0)
    timeds = (
        predicted(table, cost, "ms", [2 * m] * p),
        measured(table, events_of(table, cost, 1.1), "here", [2 * m] * p),
    )
    figure = run_figure(*timeds, critical_path=True)
    save(figure, tmp_path / "t.png")
    save(figure, tmp_path / "t.svg")
    assert (tmp_path / "t.svg").read_text().lstrip().startswith("<?xml")
    width, height = Image.open(tmp_path / "t.png").size
    assert (width, height > 300) == (1430, True)
    page = Bbox([[0, 0], [figure.bbox.width, figure.bbox.height]])
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim() == (0, pytest.approx(1.1 * timeds[0].makespan))
    for axes, timed in zip(figure.axes, timeds, strict=True):
        numbers = [text for text in axes.texts if not text.get_text().startswith(" ")]
        inside = {text.get_window_extent() for text in axes.texts} | {axes.title.get_window_extent()}
        assert all(page.fully_containsx(b.x0) and page.fully_containsx(b.x1) for b in inside)
        assert all(page.fully_containsy(b.y0) and page.fully_containsy(b.y1) for b in inside)
        assert len(numbers) == (len(timed.times) if p < 16 else 0)
        boxes = sorted((text.get_window_extent() for text in numbers), key=lambda b: (round(b.y0), b.x0))
        for a, b in itertools.pairwise(boxes):
            assert round(a.y0) != round(b.y0) or a.x1 <= b.x0, "two numbers lie over each other"
        assert all(text.get_fontsize() >= 8 for text in [*axes.texts, axes.title, *axes.get_yticklabels()])
        peaks = [text.get_text().strip() for text in axes.texts if text.get_text().startswith(" ")]
        assert peaks == [f"{peak} of {2 * m}" for peak in timed.peak_in_flight]
        for words in (f"bubble {timed.bubble:.3f}", f"at most {max(timed.peak_in_flight)} in flight", table.name):
            assert words in axes.get_title(loc="left")


def bars(axes) -> list[tuple[float, float, float, str]]:
    """All bars of actions: lane, start, end, colour."""
    found = []
    for collection in axes.collections:
        face = collection.get_facecolor()
        if type(collection).__name__ != "PolyCollection" and not hasattr(collection, "get_paths"):
            continue
        for path in collection.get_paths():
            x, y = path.vertices[:, 0], path.vertices[:, 1]
            if y.max() - y.min() == pytest.approx(0.62) and len(face):
                found.append((round((y.min() + 0.46), 6), x.min(), x.max(), tuple(face[0][:3])))
    return found


def test_the_bars_of_1f1b_p4_m6_are_the_table_in_time():
    """Each action starts after what it needs has ended; none overlap on a rank; the colours are those of the ops."""
    table = SCHEDULES["1f1b"](4, 6)
    timed = predicted(table, UNIT_COST)
    figure = table_figure(timed)
    drawn = {(rank, start): (end, colour) for rank, start, end, colour in bars(figure.axes[0])}
    assert len(drawn) == len(timed.times) == 48
    for rank, row in enumerate(timed.rows):
        for (_, _, end), (_, start, _) in itertools.pairwise(row):
            assert end <= start
        for action, start, end in row:
            found = drawn[rank, start]
            assert found[0] == pytest.approx(end)
            assert found[1] == pytest.approx(to_rgb(COLOURS[action.op]))
            assert all(timed.times[source][1] <= start for source in timed.sources(action))


def test_the_strip_is_what_the_rank_holds():
    timed = predicted(SCHEDULES["1f1b"](4, 8), UNIT_COST)
    assert [max(held for _, held in curve) for curve in timed.held] == timed.peak_in_flight == [4, 3, 2, 1]
    assert [curve[-1][1] for curve in timed.held] == [0] * 4
    split = predicted(SCHEDULES["zb-h1"](4, 8), UNIT_COST)
    assert [max(held for _, held in curve) for curve in split.held] == peak_in_flight(split.table)


def test_the_costs_of_a_run_are_its_medians():
    table = SCHEDULES["zb-h1"](2, 3)
    found = cost_of_run(events_of(table, costs(5.0, None, 2.0, 3.0)))
    assert (found.F, found.I, found.W) == (5.0, 2.0, 3.0)
    whole = cost_of_run(events_of(SCHEDULES["gpipe"](2, 3), costs(5.0, 10.0)))
    assert (whole.F, whole.B) == (5.0, 10.0)


def test_a_measured_timeline_starts_at_0_and_has_its_own_critical_path():
    table, cost = SCHEDULES["1f1b"](3, 4), costs(5.0, 10.0)
    ran = measured(table, events_of(table, cost))
    assert min(start for start, _ in ran.times.values()) == 0.0
    planned = predicted(table, cost, "ms")
    assert ran.makespan == pytest.approx(planned.makespan)
    path = ran.critical_path
    assert path[0] == Action(0, "F", 0)
    assert path[-1] == planned.critical_path[-1]
    for before, after in itertools.pairwise(path):
        assert ran.times[before][1] <= ran.times[after][0] + 1e-6


# For every reader: Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
WHITE = (0.95047, 1.0, 1.08883)


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as somebody with that sight sees it."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour)]
    r, g, b = (min(1, max(0, sum(k * x for k, x in zip(row, linear, strict=True)))) for row in SIGHT[sight])
    xyz = (
        0.4124 * r + 0.3576 * g + 0.1805 * b, 0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0193 * r + 0.1192 * g + 0.9505 * b,
    )  # fmt: skip
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in map(lambda a, w: a / w, xyz, WHITE))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart_by_every_reader_and_in_grey(sight):
    seen = {name: lab(colour, sight) for name, colour in {**COLOURS, "idle": IDLE}.items()}
    for a, b in itertools.combinations(seen, 2):
        distance = sum((x - y) ** 2 for x, y in zip(seen[a], seen[b], strict=True)) ** 0.5
        assert distance > 20, (a, b, distance)
    lightness = sorted(lab(colour, "normal")[0] for colour in (*COLOURS.values(), IDLE))
    assert min(b - a for a, b in itertools.pairwise(lightness)) > 7, lightness


# On the command line


@pytest.mark.slow
def test_one_rank_writes_one_file_without_a_display(tmp_path):
    """Four ranks of an interleaved table with 64 microbatches."""
    environment = {"DISPLAY": "", "WAYLAND_DISPLAY": "", "MPLBACKEND": "TkAgg"}
    file = tmp_path / "t.png"
    ran = torchrun(
        4, "step6_schedules", "--schedule", "interleaved", "--num-microbatches", 64, "--batch-size", 64,
        "--num-iterations", 2, "--data", "random", "--width", 16, "--timeline", file, "--memory-cap", 100,
        environment=environment,
    )  # fmt: skip
    assert ran.status == 0, ran.text
    assert os.listdir(tmp_path) == ["t.png"]
    assert Image.open(file).size[0] == 1430
    assert ran.stdout.count(f"timeline of one iteration: {file}") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeline": "t.pdf"}, "--timeline 't.pdf' must end in .png or .svg or .html"),
        ({"trace": "t.txt"}, "--trace 't.txt' must end in .json"),
        ({"critical_path": True}, "--critical-path belongs to a picture: add --timeline FILE.png"),
        ({"critical_path": True, "timeline": "t.html"}, "--critical-path belongs to a picture"),
    ],
)
def test_what_cannot_be_written_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        ViewOptions(**given)


def test_two_outputs_in_one_file_are_refused(tmp_path):
    given = [ViewOptions(trace=tmp_path / "both.json"), ResultOptions(result=tmp_path / "." / "both.json")]
    with pytest.raises(UsageError, match=r"--\w+ and --\w+ name one file, '.*both.json'; give each a file of its own"):
        check_outputs(Launch(0, 1, 0, 1), *given)
    assert list(tmp_path.iterdir()) == []
