"""What an edge carries: the messages of one pass in their order, with the shape and dtype of each tensor."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from step0_monolith.options import RunError


class ContractError(RunError):
    """A message that is not the one agreed on; raised before anything is sent."""


class Spec(NamedTuple):
    """Shape, dtype, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


class Message(NamedTuple):
    """One message: its label, such as "activation 1 of microbatch 0", and its tensors."""

    label: str
    specs: tuple[Spec, ...]


Script = list[Message]


def specs_of(tensors: Sequence[Tensor]) -> tuple[Spec, ...]:
    """One Spec a tensor."""
    return tuple(Spec(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors)


def describe(specs: Sequence[Spec]) -> str:
    """For example: (8, 16) float32 and (8,) int64."""
    return " and ".join(map(str, specs)) or "no tensor"


def fits(tensors: Sequence[Tensor], specs: Sequence[Spec]) -> bool:
    """Whether the tensors have these shapes and dtypes; a gradient's flag need not agree."""
    if len(tensors) != len(specs):
        return False
    # A loop, since each message passes here: all() of a generator takes twice as long.
    for x, (shape, dtype, _) in zip(tensors, specs, strict=True):  # noqa: SIM110
        if x.shape != shape or x.dtype != dtype:
            return False
    return True


def same_layout(a: Sequence[Spec], b: Sequence[Spec]) -> bool:
    """Whether shapes and dtypes agree; a gradient's flag need not."""
    return [x[:2] for x in a] == [x[:2] for x in b]


def to_json(script: Script) -> str:
    """The script as text for the store."""
    return json.dumps(
        [[m.label, [[s.shape, str(s.dtype).removeprefix("torch."), s.requires_grad] for s in m.specs]] for m in script]
    )


def from_json(text: str | bytes) -> Script:
    """The script that `to_json` wrote."""
    return [
        Message(label, tuple(Spec(tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in specs))
        for label, specs in json.loads(text)
    ]
