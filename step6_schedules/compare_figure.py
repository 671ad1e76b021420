"""The figure of a comparison: bubble against microbatches, and memory against bubble."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from step6_schedules.advice import Compared, beaten_by, choice_of
from step6_schedules.schedules import SCHEDULES

if TYPE_CHECKING:
    from step6_schedules.compare import Comparison

# Told apart by colour (Okabe and Ito), by marker and by line: in grey too.
STYLES = dict(
    zip(
        SCHEDULES,
        [
            ("#000000", "o", "-"), ("#e69f00", "s", "--"), ("#0072b2", "^", "-"), ("#009e73", "D", "-."),
            ("#cc79a7", "v", ":"), ("#d55e00", "P", "-"), ("#56b4e9", "X", "--"), ("#7a6a00", "*", "-."),
            ("#666666", "h", ":"),
        ],
        strict=True,
    )
)  # fmt: skip
GAP = 0.052  # between two labels, in parts of the axis's height


def comparison_figure(comparison: "Comparison"):
    """A matplotlib Figure; needs no display."""
    from matplotlib.figure import Figure  # imported late, as in timeline.py: it takes a second

    options = comparison.options
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1))
    _draw_curves(left, comparison)
    _draw_trade(right, comparison.found, choice_of(comparison.found, options.memory_cap), options.memory_cap)
    costs = options.cost.text()
    figure.suptitle(f"{options.num_ranks} ranks, {costs}, the same work in all", fontsize=10)
    return figure


def _draw_curves(axes, comparison: "Comparison") -> None:
    asked = comparison.options.num_microbatches
    for name in comparison.curves:
        colour, marker, dashes = STYLES[name]
        counts, bubbles = zip(*comparison.curves[name], strict=True)
        axes.plot(counts, bubbles, color=colour, marker=marker, linestyle=dashes, markersize=6, label=name)
    axes.axvline(asked, color="#999999", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("microbatches (grey: the number asked for)")
    axes.set_ylabel("bubble")
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_title("bubble against microbatches", loc="left", fontsize=10)
    if comparison.curves:
        axes.legend(fontsize=8, frameon=False)


def _draw_trade(axes, found: Sequence[Compared], chosen: Compared | None, cap: float | None) -> None:
    front = sorted((e for e in found if beaten_by(e, found) is None), key=lambda e: (e.bubble, e.memory))
    if front:
        axes.step([e.bubble for e in front], [e.memory for e in front], where="post", color="#999999", linewidth=1)
    for each in found:
        colour, marker, _ = STYLES[each.name]
        axes.plot(each.bubble, each.memory, marker=marker, color=colour, markersize=9, linestyle="none")
    if chosen is not None:
        axes.plot(chosen.bubble, chosen.memory, marker="o", markersize=17, markerfacecolor="none",
                  markeredgecolor="#000000", linestyle="none")  # fmt: skip
    if cap is not None:
        axes.axhline(cap, color="#000000", linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlabel("bubble")
    axes.set_ylabel("peak memory (microbatches of a rank's layers)")
    axes.margins(0.1)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=min(0, axes.get_xlim()[0]))
    axes.set_title("memory against bubble (line: none is better in both; ring: the choice)", loc="left", fontsize=10)
    _label(axes, found)


def _label(axes, found: Sequence[Compared]) -> None:
    """Names in a column to the right of the axes, each joined to its point; those of one point share a line."""
    at: dict[tuple[float, float], list[str]] = {}
    for each in found:
        at.setdefault((round(each.bubble, 6), round(each.memory, 6)), []).append(each.name)
    low, high = axes.get_ylim()
    # Of points at one height the leftmost gets the highest label, so that the lines do not cross.
    places = sorted(((y - low) / (high - low), -x, y, names) for (x, y), names in at.items())
    heights = [height for height, *_ in places]
    for n in range(1, len(heights)):
        heights[n] = max(heights[n], heights[n - 1] + GAP)
    for n in reversed(range(len(heights))):  # those that were pushed beyond the top come down again
        heights[n] = min(heights[n], 1.0 - GAP * (len(heights) - 1 - n))
    for (_, minus_x, y, names), height in zip(places, heights, strict=True):
        axes.annotate(
            ", ".join(names), (-minus_x, y), xytext=(1.03, height), textcoords="axes fraction", fontsize=8, va="center",
            annotation_clip=False, arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.7},
        )  # fmt: skip
