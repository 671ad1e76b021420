"""What turns gradients into new weights: the optimizer, its step size, and the limit on the gradients' norm."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from step0_monolith.config import Config

# As in torch.nn.utils.clip_grad_norm_: keeps the division finite when the norm is 0.
NORM_EPSILON = 1e-6


def make_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The run's optimizer over the given parameters; there may be none (a stage of activations only)."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    # A group, since torch refuses an empty list of parameters but not an empty group. `foreach` is named because its
    # default differs between devices; `fused` would round differently.
    return kinds[config.optimizer]([{"params": list(parameters)}], lr=config.learning_rate, foreach=True)


def learning_rate(config: Config, iteration: int) -> float:
    """The step size of an iteration: a function of its number alone, so that any rank and any resumed run agree.

    warmup-cosine grows in a straight line to `config.learning_rate` over the warmup, then falls along half a cosine
    that would reach 0 one iteration after the last.
    """
    if config.lr_schedule == "constant":
        return config.learning_rate
    if iteration < config.warmup_iterations:
        return config.learning_rate * (iteration + 1) / config.warmup_iterations
    done = (iteration - config.warmup_iterations) / (config.num_iterations - config.warmup_iterations)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def squared_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The squared norm of each parameter's gradient, in float64 on the CPU; 0 where there is no gradient."""
    squares = [
        torch.zeros((), dtype=torch.float64) if p.grad is None else p.grad.double().square().sum().cpu()
        for p in parameters
    ]
    return torch.stack(squares) if squares else torch.zeros(0, dtype=torch.float64)


def norm_of(squares: Tensor) -> float:
    """The norm of all gradients together, from the squares of all parameters in layer order, added in that order."""
    return math.sqrt(sum(squares.tolist()))


def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scales all gradients by max_norm / norm when the norm of all of them together is larger than `max_norm`."""
    factor = max_norm / (norm + NORM_EPSILON)
    if factor < 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def step(config: Config, optimizer: torch.optim.Optimizer, iteration: int, norm: float | None) -> None:
    """One update of the optimizer's parameters. norm: of all gradients of the model; needed to clip."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, iteration)
        if config.max_grad_norm is not None:
            clip(group["params"], norm, config.max_grad_norm)
    optimizer.step()
