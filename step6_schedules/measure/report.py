"""What was measured, as a file of all samples and as Markdown: a table a kind of figure, with the goals and misses."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from step0_monolith.options import UsageError
from step6_schedules.measure.figures import Figure
from step6_schedules.measure.launch import THREADS, Run, figure_of

# The measurements that `make bench` knows, and what they are called in the report.
TITLES = {
    "actions": "Python per action",
    "iterations": "Whole iterations",
    "handover": "Handing over from rank to rank",
    "emulated": "Emulated devices",
    "memory": "Memory of activations",
    "tracing": "Recording a trace",
    "messages": "Messages",
    "startup": "Start-up",
    "preparation": "Working through tables",
    "wins": "Where the pipeline wins",
    "suite": "The tests",
}
# Why a goal is missed: (family of the figure, condition) -> the reason found. A condition is some parts of the case,
# such as "tiny" or "1f1b, tiny", in any order; "" is any case.
WORK, TIME, EMULATED = (
    "CPU seconds of all ranks / monolith",
    "iteration time, ours / library",
    "emulated devices, makespan / table's",
)
_COLD = (
    "bare messages and the arithmetic alone cost most of it (see *by hand*: the same table with nothing checked). "
    "Every message wakes a thread on both sides, and what runs after a wait finds caches and branch predictors "
    "cold: F and B of 8 small layers take 1.4 to 1.5 times as long (`after_sleep`). About 20 us an action are our "
    "Python"
)
_SHARED = (
    "two processes at once take memory and caches from each other (see *monoliths side by side*, which exchange "
    "nothing), and the same table by hand costs as much"
)
_FLOOR = (
    "the library is close to what the arithmetic and bare messages take there: the same table by hand is no "
    "faster than ours (see *by hand*, where it is measured)"
)
_REST = (
    "a hand-over after milliseconds of rest takes longer than in a busy program: a bare hop of 73 us became 230 "
    "us with 2 ranks and 300 to 430 us with 8 ranks on 2 cores. The longest path has some 22 of them, which is 2 "
    "% and more of it; sleeps that end late are a fifth of the rest"
)
REASONS: dict[tuple[str, str], str] = {
    (WORK, "tiny"): _COLD,
    (WORK, "middle"): _SHARED,
    (WORK, "large"): _SHARED,
    (TIME, "1f1b, middle"): _FLOOR,
    (TIME, "1f1b, large"): _FLOOR,
    (TIME, "gpipe, large"): _FLOOR,
    (TIME, "interleaved, large"): _FLOOR,
    (TIME, "dualpipe-v, large"): (
        "in a V of four stages of two layers rank 0 has the first and the last layer, which are small, and so a "
        "third of the work: the other rank's arithmetic is the iteration's length, for the library as for ours"
    ),
    ("speed-up over the monolith, of the ideal", "large"): (
        "the ideal takes both cores to be as fast as one alone. Side by side they are not (see *monoliths side by "
        "side* above), and page faults cost each process some tenth of an iteration: gradients of 16 MiB go back "
        "to the system and come again"
    ),
    (EMULATED, ""): _REST,
    ("message latency, ours / bare", ""): (
        "the contract (is it this message's turn, shape, dtype, who waits for whom) is Python, 3 us at each end "
        "when it is warm. Between two waits it is cold, and takes 15 to 25 us"
    ),
    ("message bandwidth, ours / bare", ""): (
        "not settled: several runs gave 0.89 to 1.14. The bytes go through the same two gloo calls, in a buffer "
        "that is used again; the way back has a communicator of its own, where the bare calls have one for both"
    ),
    ("start-up to the first iteration, ours / bare", ""): (
        "about 0.25 s is sympy, which torch imports at the first backward of a tensor that is no loss; our own "
        "imports take 0.1 s; the rest opens communicators, agrees on the messages, and runs (see what a bare "
        "program takes that makes one step of an optimizer)"
    ),
}
UNKNOWN = "no reason found yet"


class Picture(NamedTuple):
    """A picture beside the Markdown. family: of the measurements that it shows."""

    family: str
    file: str
    caption: str


@dataclass
class Report:
    """All that one run of `make bench` found. commit: None where git knows none. seconds: that it took."""

    command: str
    date: str
    commit: str | None
    seconds: float
    conditions: dict[str, object]
    runs: list[Run]

    @property
    def figures(self) -> list[Figure]:
        """All figures, in the order of their measurement."""
        return [figure for run in self.runs for figure in run.figures]

    def to_json(self) -> dict[str, object]:
        """Everything, the samples too."""
        runs = [{**asdict(run), "figures": [figure.to_json() for figure in run.figures]} for run in self.runs]
        return {**asdict(self), "runs": runs}


def read_report(flag: str, path: Path) -> Report:
    """Reads a file of `Report.to_json` back. Raises UsageError when it is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        runs = [Run(**{**run, "figures": list(map(figure_of, run["figures"]))}) for run in fields["runs"]]
        return Report(**{**fields, "runs": runs})
    except OSError as error:
        raise UsageError(f"{flag} {str(path)!r} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{flag} {str(path)!r} is no bench.json; name one that make bench wrote") from None


def reason_for(figure: Figure) -> str | None:
    """Why a figure misses its goal: of the conditions that its case fulfils, the one with most parts.

    None for a figure that misses none; a miss that nobody has explained says so.
    """
    if figure.is_met is not False:
        return None
    case = _parts(figure.case)
    found = [(len(_parts(c)), text) for (f, c), text in REASONS.items() if f == figure.family and _parts(c) <= case]
    return max(found)[1] if found else UNKNOWN


def _parts(case: str) -> set[str]:
    return {part.strip() for part in case.split(",")} - {""}


def shown(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, without an exponent as far as that is readable."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    value = float(f"{value:.{digits}g}")
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, places)}f}" if -6 < places < 7 else f"{value:.2e}"


def summary(report: Report) -> str:
    """How many goals are met, in one sentence, and what to think of before one believes it."""
    verdicts = [figure.is_met for figure in report.figures if figure.is_met is not None]
    disturbed = sum(figure.is_disturbed for figure in report.figures)
    missing = sum(run.error is not None for run in report.runs)
    text = f"{sum(verdicts)} of {len(verdicts)} goals met"
    if disturbed:
        text += f"; {disturbed} of {len(report.figures)} figures disturbed by other load"
    if missing:
        text += f"; {missing} of {len(report.runs)} programs without figures, whose goals are not counted"
    return text + "."


def markdown(report: Report, pictures: Sequence[Picture] = ()) -> str:
    """The report as Markdown."""
    commit = f"at commit `{report.commit}`" if report.commit else "outside of git"
    lines = [
        "# What it costs, measured",
        "",
        f"Written by `{report.command}` on {report.date}, {commit}; it took {shown(report.seconds / 60)} minutes.",
        "",
        f"**{summary(report)}**",
        "",
        *_table(["condition", ""], _conditions(report)),
        "",
        "Each value is a median of rounds in which all that is compared takes turns. *Load* is the share of all cores "
        "that other programs used meanwhile.",
    ]
    for family in dict.fromkeys(run.family for run in report.runs):
        runs = [run for run in report.runs if run.family == family]
        lines += ["", f"## {TITLES[family]}", ""]
        lines += [f"- `{run.command}`" + (f": **not measured**: {run.error}" if run.error else "") for run in runs]
        figures = [figure for run in runs for figure in run.figures]
        for kind in dict.fromkeys(figure.family for figure in figures):
            lines += ["", f"### {kind[0].upper()}{kind[1:]}", ""]
            lines += _section([figure for figure in figures if figure.family == kind])
        for picture in pictures:
            if picture.family == family:
                lines += ["", f"![{picture.caption}]({picture.file})"]
    return "\n".join(lines) + "\n"


def _conditions(report: Report) -> list[list[str]]:
    rows = []
    for name, value in report.conditions.items():
        text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        rows.append([name.replace("_gib", ", GiB").replace("_", " "), text])
    rows.append(["threads a rank", str(THREADS)])
    loads = [figure.others for figure in report.figures if figure.others is not None]
    if loads:
        rows.append(["load of others", f"median {statistics.median(loads):.0%}, worst {max(loads):.0%}"])
    return rows


def _section(figures: list[Figure]) -> list[str]:
    """One kind of figure: the table of verdicts, the reasons of the misses, and the numbers beside."""
    unit = {figure.unit for figure in figures}
    heads = ["case", "value" if unit == {"ratio"} else f"value, {' or '.join(sorted(unit))}"]
    lines = _table([*heads, "quartiles", "goal", "verdict", "load"], map(_verdict, figures))
    misses = [figure for figure in figures if figure.is_met is False]
    if misses:
        by_reason: dict[str | None, list[str]] = {}
        for figure in misses:
            by_reason.setdefault(reason_for(figure), []).append(figure.case)
        lines += ["", "Missed:", ""]
        lines += [f"- {'; '.join(cases)}: {reason}" for reason, cases in by_reason.items()]
    names = list(dict.fromkeys(name for figure in figures for name in figure.beside))
    if names:
        cells = [[shown(f.beside[name]) if name in f.beside else "" for name in names] for f in figures]
        rows = [[f.case, *row] for f, row in zip(figures, cells, strict=True) if f.beside]
        lines += ["", "Beside it, from the same rounds:", "", *_table(["case", *names], rows)]
    return lines


def _verdict(figure: Figure) -> list[str]:
    low_high = "" if figure.spread is None else f"{shown(figure.spread[0])} to {shown(figure.spread[1])}"
    goal = "" if figure.goal is None else f"{'≤' if figure.at_most else '≥'} {figure.goal:g}"
    word = {True: "met", False: "**MISSED**", None: "no goal"}[figure.is_met]
    load = "" if figure.others is None else f"{figure.others:.0%}"
    digits = 3
    while replace(figure, value=float(f"{figure.value:.{digits}g}")).is_met != figure.is_met:
        digits += 1  # a miss by less than the third digit shows as one
    load += ", **disturbed**" if figure.is_disturbed else ""
    return [figure.case, shown(figure.value, digits), low_high, goal, word, load]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Numbers to the right, the first column to the left."""
    marks = [":--", *["--:"] * (len(heads) - 1)]
    return [_row(heads), _row(marks), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
