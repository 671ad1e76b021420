"""What a rank holds while it trains: bytes of weights, gradients, optimizer state and activations, by formula and
counted.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from step0_monolith.config import Config
from step0_monolith.data import microbatch_sizes
from step1_partition.partition import bounds, partition
from step5_orchestrator.prediction import peak_in_flight
from step5_orchestrator.table import Table

STEP_BYTES = 4  # Adam counts the updates of each tensor in a float32
TARGET_BYTES = 8  # a label is an int64
MOMENTS = {"sgd": 0, "adam": 2}  # numbers that the optimizer keeps for each parameter


class Held(NamedTuple):
    """Bytes of one rank. state: the optimizer's. activations: at their peak, all that autograd keeps for backwards."""

    weights: int
    gradients: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)

    def words(self) -> str:
        """Such as `weights 59.9 + gradients 59.9 + optimizer 119.8 + activations 0.6 = 240.1 MB`."""
        names = ("weights", "gradients", "optimizer", "activations")
        parts = " + ".join(f"{name} {value / 1e6:.1f}" for name, value in zip(names, self, strict=True))
        return f"{parts} = {self.total / 1e6:.1f} MB"


def formula(config: Config, table: Table, rank: int) -> Held:
    """What a rank holds, from sizes alone, in float32 or float64; the table has one chunk a rank, and the layers are
    shared out evenly.

    A linear layer keeps what enters it. Its ReLU keeps what leaves it, which is what enters the next: so a stage keeps
    its input and what each of its layers puts out, once, for each microbatch in flight.
    """
    start, stop = bounds(partition(config.num_layers, table.num_stages))[rank]
    shapes = [config.shape_of_layer(index) for index in range(start, stop)]
    size = config.torch_dtype.itemsize
    weights = sum(n_in * n_out + n_out for n_in, n_out in shapes) * size
    moments = MOMENTS[config.optimizer]
    state = moments * weights + (2 * len(shapes) * STEP_BYTES if moments else 0)
    rows = max(microbatch_sizes(config.batch_size, config.num_microbatches))
    features = shapes[0][0] + sum(n_out for _, n_out in shapes)
    one = rows * features * size
    if stop == config.num_layers:
        # In place of the last layer's outputs, which nobody needs, the loss keeps the logarithms of the probabilities,
        # which are as many; and the labels, and the sum of the rows' weights, which is one number.
        one += rows * TARGET_BYTES + size
    return Held(weights, weights, state, one * peak_in_flight(table)[rank])


class Activations:
    """Counts, inside `counting`, the bytes that autograd keeps for backward passes; parameters are not among them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._users: dict[tuple[int, int], int] = {}
        self.held = self.peak = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Forward passes inside are counted."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            yield

    def _keep(self, tensor: Tensor) -> "_Kept":
        if tensor.untyped_storage().data_ptr() in self._own:
            return _Kept(None, tensor, None)
        # One tensor that two operations keep is there once.
        key = (tensor.data_ptr(), tensor.nbytes)
        self._users[key] = self._users.get(key, 0) + 1
        if self._users[key] == 1:
            self.held += tensor.nbytes
            self.peak = max(self.peak, self.held)
        return _Kept(self, tensor, key)

    def _forget(self, key: tuple[int, int]) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.held -= key[1]


class _Kept:
    """A tensor that autograd keeps; autograd drops this when it needs it no more."""

    def __init__(self, activations: Activations | None, tensor: Tensor, key: tuple[int, int] | None) -> None:
        self._activations, self.tensor, self._key = activations, tensor, key

    def __del__(self) -> None:
        if self._activations is not None:
            self._activations._forget(self._key)


def counted(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, activations: Activations) -> Held:
    """What this process holds, read from its tensors; activations: counted while it trained."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return Held(
        weights=sum(p.nbytes for p in parameters),
        gradients=sum(p.grad.nbytes for p in parameters if p.grad is not None),
        state=sum(value.nbytes for value in states if isinstance(value, Tensor)),
        activations=activations.peak,
    )
