"""python -m step6_schedules.compare: schedules side by side, the bubble and the memory of each, and which to take.

All have the same ranks, microbatches and work: the costs are those of all layers of a rank, and an action of one of V
chunks takes 1/V of them. Memory counts microbatches of a whole rank's layers, so that a chunk of V counts 1/V.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from step0_monolith.files import check_writable, write_whole
from step0_monolith.options import (
    Options,
    UsageError,
    number,
    option,
    optional,
    output_file,
    parse,
    run_program,
    whole,
)
from step5_orchestrator.costs import UNIT_COST, Cost, read_costs
from step5_orchestrator.table import TableError
from step5_orchestrator.words import counted
from step6_schedules.advice import EPSILON, LOW, Compared, advise, beaten_by, choice_of
from step6_schedules.schedules import SCHEDULES
from step6_schedules.simulate import Simulation

MAX_ACTIONS = 300_000  # of all tables of the comparison; a few seconds
FEW, MANY = 1, 4  # the curves go from 1 microbatch to the larger of 4 P and 2 M


def names_of(flag: str, value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Some schedules' names with commas between them, each once."""
    names = tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value
    for name in names:
        if name not in SCHEDULES:
            also = "; a table that is searched for is made by step6_schedules.table auto" if name == "auto" else ""
            raise UsageError(f"{flag} {name!r} is unknown; choose some of {','.join(SCHEDULES)}{also}")
        if names.count(name) > 1:
            raise UsageError(f"{flag} names {name} twice; name each once")
    return names


@dataclass(frozen=True)
class CompareOptions(Options):
    """What is compared."""

    schedules: tuple[str, ...] = option(tuple(SCHEDULES), names_of, "schedules, with commas between (default: all)")
    num_ranks: int = option(4, whole(1, 256), "ranks")
    num_microbatches: int = option(8, whole(1, 4096), "microbatches")
    cost: Cost = option(
        UNIT_COST,
        lambda flag, value: read_costs(flag, value, "F=1,B=2,I=1,W=1,comm=0"),
        "times of an action of all layers of a rank, and of a message (default: F=1,B=2)",
    )
    memory_cap: float | None = option(
        None, optional(number(0)), "microbatches of all a rank's layers that it may hold at most (default: no limit)"
    )
    png: Path | None = option(None, optional(output_file(".png", ".svg")), "file for the figure")
    json: Path | None = option(None, optional(output_file(".json")), "file for the numbers")

    def check_together(self) -> None:
        """Raises UsageError where even the tables of the size asked for are too many actions."""
        actions = sum(self.actions_of(name, self.num_microbatches) for name in self.schedules)
        if actions > MAX_ACTIONS:
            raise UsageError(
                f"--num-ranks {self.num_ranks} and --num-microbatches {self.num_microbatches} make {actions} actions "
                f"in {len(self.schedules)} schedules, and {MAX_ACTIONS} is the most; take fewer"
            )

    def actions_of(self, name: str, num_microbatches: int) -> int:
        """How many actions a schedule has."""
        schedule = SCHEDULES[name]
        return self.num_ranks * num_microbatches * schedule.default_chunks * (3 if schedule.splits else 2)


def compared(name: str, num_ranks: int, num_microbatches: int, cost: Cost) -> Compared:
    """One schedule's numbers. Raises TableError for a size that it cannot have."""
    schedule = SCHEDULES[name]
    chunks = schedule.default_chunks
    own = cost.scaled(1 / chunks)
    simulation = Simulation(schedule.table(num_ranks, num_microbatches, None, own), own)
    memory = max(simulation.peak_in_flight) / chunks
    return Compared(name, chunks, schedule.splits, simulation.makespan, simulation.bubble, memory)


def curve_at(options: CompareOptions) -> list[int]:
    """The numbers of microbatches of the curves: 1, 2, 3, 4, 6, 8, 12, ... and the one asked for, as far as the number
    of actions allows.
    """
    asked = options.num_microbatches
    most = max(MANY * options.num_ranks, 2 * asked)
    wanted = sorted({asked, *(n for k in range(13) for n in (2**k, 3 * 2**k) if n <= most)})
    found, total = [asked], 0
    for count in wanted:
        total += sum(options.actions_of(name, count) for name in options.schedules)
        if total <= MAX_ACTIONS and count != asked:
            found.append(count)
    return sorted(found)


@dataclass
class Comparison:
    """All numbers.

    impossible: why a schedule cannot have the size. curves: for each schedule (microbatches, bubble).
    """

    options: CompareOptions
    found: list[Compared]
    impossible: dict[str, str]
    curves: dict[str, list[tuple[int, float]]]

    @cached_property
    def advice(self) -> str:
        """What to choose and why."""
        chosen = choice_of(self.found, self.options.memory_cap)
        curves = self.curves if chosen is None else {chosen.name: self.fine_curve(chosen.name)}
        return advise(self.found, self.options.memory_cap, curves)

    def fine_curve(self, name: str) -> list[tuple[int, float]]:
        """A schedule's curve, with every number of microbatches where it falls below the bubble that the advice names,
        as far as the number of actions allows.
        """
        curve, options = self.curves[name], self.options
        high = max((n for n, (_, bubble) in enumerate(curve) if bubble >= LOW - EPSILON), default=None)
        if high is None or high + 1 == len(curve):
            return curve
        between = range(curve[high][0] + 1, curve[high + 1][0])
        if sum(options.actions_of(name, count) for count in between) > MAX_ACTIONS:
            return curve
        return sorted([*curve, *_bubbles(options, name, between)])


def compare(options: CompareOptions) -> Comparison:
    """Compares the schedules, the smallest bubble first, then the least memory."""
    found, impossible = [], {}
    curves: dict[str, list[tuple[int, float]]] = {}
    for name in options.schedules:
        try:
            found.append(compared(name, options.num_ranks, options.num_microbatches, options.cost))
        except TableError as error:
            impossible[name] = str(error)
            continue
        curves[name] = _bubbles(options, name, curve_at(options))
    found.sort(key=lambda each: (round(each.bubble, 9), round(each.memory, 9), list(SCHEDULES).index(each.name)))
    return Comparison(options, found, impossible, curves)


def _bubbles(options: CompareOptions, name: str, counts: Iterable[int]) -> list[tuple[int, float]]:
    found = []
    for count in counts:
        try:
            found.append((count, compared(name, options.num_ranks, count, options.cost).bubble))
        except TableError:  # not with so few microbatches
            continue
    return found


def as_text(comparison: Comparison) -> str:
    """The table, and below it what to choose."""
    options, found = comparison.options, comparison.found
    head = ["schedule", "chunks", "makespan", "bubble", "memory", "beaten by"]
    rows = [
        [each.name, str(each.chunks), f"{each.makespan:g}", f"{each.bubble:.3f}", f"{each.memory:g}",
         getattr(beaten_by(each, found), "name", "")]
        for each in found
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    sizes = f"{counted(options.num_ranks, 'rank')}, {counted(options.num_microbatches, 'microbatch')}"
    lines = [f"{sizes}, {options.cost.text()}"]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    lines += [f"not possible: {reason}" for reason in comparison.impossible.values()]
    return "\n".join([*lines, "", comparison.advice])


def as_json(comparison: Comparison) -> str:
    """The numbers as one JSON object."""
    options = comparison.options
    found = {
        "num_ranks": options.num_ranks,
        "num_microbatches": options.num_microbatches,
        "schedules": [
            {**vars(each), "beaten_by": getattr(beaten_by(each, comparison.found), "name", None)}
            for each in comparison.found
        ],
        "impossible": comparison.impossible,
        "bubble_by_microbatches": comparison.curves,
        "advice": comparison.advice,
    }
    return json.dumps(found, indent=1) + "\n"


def outputs(options: CompareOptions) -> Sequence[tuple[str, Path | None]]:
    """The files that were asked for, by their flags."""
    return [("--png", options.png), ("--json", options.json)]


def main() -> None:
    """Compares, prints, and writes the files."""
    (options,) = parse("python -m step6_schedules.compare", __doc__, {CompareOptions: None})
    for flag, path in outputs(options):
        check_writable(flag, path)
    comparison = compare(options)
    print(as_text(comparison))
    if options.json:
        write_whole(options.json, lambda temporary: temporary.write_text(as_json(comparison), encoding="utf-8"))
    if options.png:
        from step6_schedules.compare_figure import comparison_figure
        from step6_schedules.timeline import save

        save(comparison_figure(comparison), options.png)


if __name__ == "__main__":
    run_program(main)
