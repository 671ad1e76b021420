"""One measured figure, with its goal and its conditions: what the report is made of."""

from dataclasses import asdict, dataclass, field

from step6_schedules.measure.load import DISTURBED
from step6_schedules.measure.rounds import Spread


@dataclass
class Figure:
    """A number that was measured, and the goal it has, if any.

    family: what it belongs to, such as "iteration time". case: what was run, such as "1f1b, tiny". value: the median.
    spread: the quartiles. goal, at_most: value <= goal, or >= where at_most is false. others: the share of all cores
    that others used meanwhile. beside: further numbers of the same run, by their names. samples: all that was measured.
    """

    family: str
    case: str
    value: float
    unit: str = "ratio"
    spread: tuple[float, float] | None = None
    goal: float | None = None
    at_most: bool = True
    others: float | None = None
    beside: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    @property
    def is_disturbed(self) -> bool:
        """Whether others used so much of the machine that the figure says little."""
        return self.others is not None and self.others > DISTURBED

    def line(self) -> str:
        """On one line for the terminal: the figure, its spread, its goal and whether it is met."""
        parts = [f"{self.family}, {self.case}: {self.value:.3g} {self.unit}"]
        if self.spread is not None:
            parts.append(f"({self.spread[0]:.3g} to {self.spread[1]:.3g})")
        if self.goal is not None:
            parts.append(
                f"goal {'at most' if self.at_most else 'at least'} {self.goal:g}: {'met' if self.is_met else 'MISSED'}"
            )
        parts += [f"{name} {value:.3g}" for name, value in self.beside.items()]
        if self.is_disturbed:
            parts.append(f"DISTURBED: others used {self.others:.0%} of the cores")
        return "; ".join(parts)

    def to_json(self) -> dict[str, object]:
        """All of it, and the verdict."""
        return {**asdict(self), "is_met": self.is_met, "is_disturbed": self.is_disturbed}


def of_spread(found: Spread) -> dict[str, object]:
    """A spread as the arguments `value` and `spread` of a figure."""
    return {"value": found.median, "spread": (found.low, found.high)}
