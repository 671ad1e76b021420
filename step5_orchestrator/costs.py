"""What actions and messages cost: the times that a table is simulated with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from step0_monolith.options import UsageError, number
from step5_orchestrator.actions import OPS, Action

LEAST = 1e-6


@dataclass(frozen=True)
class Cost:
    """Times of one unit, slots or milliseconds.

    F, B, I, W: of one action of that op on one stage. named: the ops whose times were given; the others were made from
    them (B = I + W; I and W half of B each). comm: a message between two ranks travels that long, plus message_bytes /
    bandwidth (bytes a unit of time); message_bytes: one number, or one for each boundary 1 .. S-1. overlaps: whether
    the sender goes on with its next action meanwhile; otherwise the message occupies it. stage_factors: for uneven
    stages, what each stage's actions take more or less.
    """

    F: float = 1.0
    B: float = 2.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    comm: float = 0.0
    named: tuple[str, ...] = ("F", "B")
    stage_factors: tuple[float, ...] | None = None
    message_bytes: float | tuple[float, ...] = 0.0
    bandwidth: float = float("inf")
    overlaps: bool = True

    def of(self, action: Action) -> float:
        """Time of one action."""
        factor = 1.0 if self.stage_factors is None else self.stage_factors[action.stage]
        return getattr(self, action.op) * factor

    def message(self, boundary: int) -> float:
        """Time of one message over the boundary before stage `boundary`, between two ranks."""
        size = self.message_bytes if isinstance(self.message_bytes, int | float) else self.message_bytes[boundary - 1]
        return self.comm + (size / self.bandwidth if size else 0.0)

    @property
    def names_split(self) -> bool:
        """Whether I or W was given and B was not."""
        return "B" not in self.named and bool({"I", "W"} & {*self.named})

    def with_stages(self, factors: Sequence[float] | None) -> "Cost":
        """The same cost with uneven stages."""
        return replace(self, stage_factors=None if factors is None else tuple(factors))

    def scaled(self, factor: float) -> "Cost":
        """The same cost with actions that take `factor` times as long; messages take as long as before."""
        times = {op: factor * getattr(self, op) for op in OPS}
        return replace(self, **times)

    def text(self, ops: Sequence[str] = OPS) -> str:
        """Such as `F=1, B=2`: the given ops, and comm where it is not 0."""
        parts = [f"{op}={getattr(self, op):g}" for op in ops]
        return ", ".join([*parts, *([f"comm={self.comm:g}"] if self.comm else [])])


UNIT_COST = Cost()


def costs(F: float, B: float | None = None, I: float | None = None, W: float | None = None, comm: float = 0.0) -> Cost:  # noqa: E741
    """A cost of which some ops are given; at least F and one of B, or I and W. Raises ValueError otherwise."""
    if B is None and (I is None or W is None):
        raise ValueError("F and B are needed, or F, I and W")
    given = {"F": F, "B": B, "I": I, "W": W}
    named = tuple(op for op in OPS if given[op] is not None)
    if B is None:
        B = I + W
    return Cost(F, B, B / 2 if I is None else I, B / 2 if W is None else W, comm, named)


def read_costs(flag: str, value: "str | Cost", example: str = "F=1,B=2", at_most: float = 86_400_000) -> Cost:
    """The cost written as `F=1,B=2`, `F=1,I=1,W=1` or with more names, `comm` among them.

    Raises UsageError for an unknown or repeated name, a number that is not above 0 (comm: below 0), or a missing op.
    """
    if isinstance(value, Cost):
        return value
    given: dict[str, float] = {}
    for part in value.split(","):
        name, sign, text = (piece.strip() for piece in part.partition("="))
        if name not in (*OPS, "comm") or not sign or name in given:
            known = ", ".join(f"{each}=number" for each in (*OPS, "comm"))
            raise UsageError(f"{flag} {value!r}: {part!r} is not one of {known}, each once")
        given[name] = number(0, at_most, or_equal=name == "comm")(f"{flag} {name}", text)
        if name != "comm" and given[name] < LEAST:
            raise UsageError(f"{flag} {name} must be at least {LEAST:g}, not {text}; choose a smaller unit")
    split = "I" in given and "W" in given
    if "F" not in given or not ("B" in given or split):
        raise UsageError(f"{flag} {value!r} must name F and B, or F, I and W, such as {example}")
    return costs(**given)
