"""What turns gradients into new weights."""

from collections.abc import Iterable

import torch
from torch import nn

from step0_monolith.config import Config


def make_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The run's optimizer over the given parameters; there may be none (a stage of activations only)."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    # A group, since torch refuses an empty list of parameters but not an empty group. `foreach` is named because its
    # default differs between devices; `fused` would round differently.
    return kinds[config.optimizer]([{"params": list(parameters)}], lr=config.learning_rate, foreach=True)
