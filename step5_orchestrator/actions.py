"""What an action needs and what it makes: the only dependency rules in the repository."""

import re
from typing import NamedTuple

OPS = ("F", "B")


class Action(NamedTuple):
    """One cell of a table, such as `2F0`: stage 2, forward, microbatch 0. B is the full backward."""

    stage: int
    op: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


def parse_action(text: str) -> Action:
    """The action written as `text`. Raises ValueError for anything but a stage, a known op and a microbatch."""
    match = re.fullmatch(rf"([0-9]+)({'|'.join(OPS)})([0-9]+)", text)
    if match is None:
        raise ValueError(f"{text!r} is not an action such as 2F0")
    stage, op, microbatch = match.groups()
    return Action(int(stage), op, int(microbatch))


class Value(NamedTuple):
    """What one action makes for another.

    kind: "activation" or "gradient", at the boundary before stage `place`; or "saved", what the forward of stage
    `place` keeps for its backward.
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
    return (Value("gradient", stage + 1, m), Value("saved", stage, m))


def makes(action: Action) -> tuple[Value, ...]:
    """The values that exist once the action has ended."""
    stage, op, m = action
    if op == "F":
        return (Value("activation", stage + 1, m), Value("saved", stage, m))
    return (Value("gradient", stage, m),)


def is_given(value: Value, num_stages: int) -> bool:
    """Whether no action makes the value: the batch enters before stage 0, the loss's gradient after the last stage."""
    return value[:2] in (("activation", 0), ("gradient", num_stages))
