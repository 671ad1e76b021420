"""The timeline as a page: one HTML file with all that it needs, to zoom, step through time and compare in a browser."""

import html
import json
from collections.abc import Sequence
from pathlib import Path

from step0_monolith.files import write_whole
from step5_orchestrator.actions import Action, Value, is_given, needs
from step5_orchestrator.table import TableError
from step6_schedules.lanes import COLOURS, LIGHT_TEXT, NAMES, opacity
from step6_schedules.placement import placement_of
from step6_schedules.schedules import SCHEDULES
from step6_schedules.timed import Timed, predicted

PARTS = Path(__file__).parent / "page"
SCRIPTS = ("words.js", "draw.js", "view.js")
MAX_ACTIONS = 40_000  # of all timelines of a page
# What passes between two actions, and what it is where no action makes it.
KINDS = {
    "activation": ("the activation from", "the batch, which is given"),
    "gradient": ("the gradient from", "the gradient of the loss, which is given"),
    "saved": ("what is saved by", ""),
    "kept": ("what is kept by", ""),
}
NOTE = (
    "Others to compare with have as many ranks and microbatches; a rank's layers take the same time in all of them, so "
    "that an action of one of V chunks takes 1/V of it."
)


def write_page(path: Path, timelines: Sequence[Timed]) -> None:
    """Writes the page whole or not at all. timelines: the first is shown, and below it, where it is there, what was
    measured of it. Raises RunError when the disk refuses.
    """
    text = page_of(timelines)
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def page_of(timelines: Sequence[Timed]) -> str:
    """The page's text."""
    has_others = len({timed.table.name for timed in timelines}) > 1
    found = {
        "ops": {op: {"colour": COLOURS[op], "name": NAMES[op], "light": op in LIGHT_TEXT}
                for op in COLOURS if any(op in timed.table.ops for timed in timelines)},
        "kinds": list(KINDS.values()),
        "note": NOTE if has_others else "",
        "timelines": [as_json(timed) for timed in timelines],
    }  # fmt: skip
    parts = {
        "TITLE": html.escape(f"{timelines[0].table.name}: who does what when"),
        "STYLE": (PARTS / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join((PARTS / name).read_text(encoding="utf-8") for name in SCRIPTS),
        # A table's name is its file's, and must not end the script.
        "DATA": json.dumps(found, separators=(",", ":")).replace("<", "\\u003c"),
    }
    pieces = (PARTS / "page.html").read_text(encoding="utf-8").split("%")
    return "".join(parts.get(piece, piece) for piece in pieces)


def as_json(timed: Timed) -> dict:
    """A timeline for the page. Actions are numbered rank by rank, each rank's in its order.

    needs: for each action pairs (number of the one that makes it, number of its kind in KINDS); what is given has the
    number -1. The page turns them round to say who waits. before: the action before it on its rank, or -1.
    """
    table = timed.table
    order = [action for row in table.rows for action in row]
    number = {action: n for n, action in enumerate(order)}
    rows, before, opacities = [], [], []
    for rank, row in enumerate(table.rows):
        first = len(before)
        stages = table.stages_of(rank)
        rows.append(list(range(first, first + len(row))))
        before += [-1, *range(first, first + len(row) - 1)]
        opacities += [round(opacity(stages.index(action.stage), len(stages)), 3) for action in row]
    return {
        "name": table.name,
        "measured": timed.is_measured,
        "unit": timed.unit,
        "cost": "" if timed.cost is None else timed.cost.text(table.ops),
        "note": timed.note,
        "caps": timed.caps,
        "makespan": _rounded(timed.makespan),
        "bubble": timed.bubble,
        "peaks": timed.peak_in_flight,
        "rows": rows,
        "rank": [table.rank_of_stage[action.stage] for action in order],
        "stage": [action.stage for action in order],
        "op": "".join(action.op for action in order),
        "microbatch": [action.microbatch for action in order],
        "start": [_rounded(timed.times[action][0]) for action in order],
        "end": [_rounded(timed.times[action][1]) for action in order],
        "before": before,
        "opacity": opacities,
        "needs": [[_need(timed, value, number) for value in needs(action)] for action in order],
        "path": [number[action] for action in timed.critical_path],
        "held": [[[_rounded(at), round(count)] for at, count in curve] for curve in timed.held],
    }


def _need(timed: Timed, value: Value, number: dict[Action, int]) -> list[int]:
    given = is_given(value, timed.table.num_stages)
    return [-1 if given else number[timed.makers[value]], list(KINDS).index(value.kind)]


def _rounded(value: float) -> float:
    return round(value, 5)


def other_timelines(shown: Timed) -> list[Timed]:
    """What other schedules would do with as many ranks and microbatches, where a rank's layers take as long.

    shown: a prediction. A schedule that cannot have this size is left out, and all are where the page would be too
    large.
    """
    table = shown.table
    _, chunks = placement_of(table)
    found: list[Timed] = []
    if chunks is None:  # ranks with different numbers of chunks have no cost of a rank's layers
        return found
    total = 2 * len(shown.times)
    for name, schedule in SCHEDULES.items():
        if name == table.name:
            continue
        own = schedule.only_chunks or schedule.default_chunks
        cost = shown.cost.scaled(chunks / own)
        try:
            other = schedule.table(table.num_ranks, table.num_microbatches, None, cost)
        except TableError:
            continue
        total += sum(map(len, other.rows))
        if total > MAX_ACTIONS:
            return []
        found.append(predicted(other, cost, shown.unit))
    return found
