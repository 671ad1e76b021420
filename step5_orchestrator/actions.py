"""What an action needs and what it makes: the only dependency rules in the repository."""

import re
from typing import NamedTuple

OPS = ("F", "B", "I", "W")
_CELL = re.compile(rf"([0-9]{{1,9}})({'|'.join(OPS)})([0-9]{{1,9}})")


class Action(NamedTuple):
    """One cell of a table, such as `2F0`: stage 2, forward, microbatch 0.

    op: F, the forward; B, the full backward; or in its place I, the backward for the input, and later W, the backward
    for the weights. (The zero-bubble papers write B for our I.)
    """

    stage: int
    op: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


def parse_action(text: str) -> Action:
    """The action written as `text`. Raises ValueError for anything but a stage, a known op and a microbatch."""
    match = _CELL.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action such as 2F0")
    stage, op, microbatch = match.groups()
    return Action(int(stage), op, int(microbatch))


class Value(NamedTuple):
    """What one action makes for another.

    kind: "activation" or "gradient", at the boundary before stage `place`; "saved", what the forward of stage `place`
    keeps for its backward; or "kept", what the I of stage `place` keeps for its W.
    """

    kind: str
    place: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} {self.place} of microbatch {self.microbatch}"


def needs(action: Action) -> tuple[Value, ...]:
    """The values that must exist before the action starts."""
    stage, op, m = action
    if op == "F":
        return (Value("activation", stage, m),)
    if op == "W":
        return (Value("kept", stage, m),)
    return (Value("gradient", stage + 1, m), Value("saved", stage, m))


def makes(action: Action) -> tuple[Value, ...]:
    """The values that exist once the action has ended."""
    stage, op, m = action
    if op == "F":
        return (Value("activation", stage + 1, m), Value("saved", stage, m))
    if op == "I":
        return (Value("gradient", stage, m), Value("kept", stage, m))
    if op == "W":
        return ()
    return (Value("gradient", stage, m),)


def taker(value: Value) -> int:
    """The stage that needs the value; -1 or the number of stages when none does."""
    return value.place - 1 if value.kind == "gradient" else value.place


def is_given(value: Value, num_stages: int) -> bool:
    """Whether no action makes the value: the batch enters before stage 0, the loss's gradient after the last stage."""
    kind, place, _ = value
    return (kind == "activation" and place == 0) or (kind == "gradient" and place == num_stages)


def ends_flight(action: Action) -> bool:
    """Whether the rank lets go of the microbatch's activations of this stage: at B, or at W where B is split."""
    return action.op in ("B", "W")
