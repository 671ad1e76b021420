"""What turns gradients into new weights: the optimizer, its step size, and the limit on the gradients' norm."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from step0_monolith.config import Config
from step0_monolith.options import RunError
from step0_monolith.uncompiled import uncompiled

# As in torch.nn.utils.clip_grad_norm_: keeps the division finite when the norm is 0.
NORM_EPSILON = 1e-6


def make_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The run's optimizer over the given parameters; there may be none (a stage of activations only)."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    # A group, since torch refuses an empty list of parameters but not an empty group. `foreach` is named because its
    # default differs between devices; `fused` would round differently.
    kind = uncompiled(kinds[config.optimizer])
    return kind([{"params": list(parameters)}], lr=config.learning_rate, foreach=True)


def learning_rate(config: Config, update: int) -> float:
    """The step size of an update: a function of its number alone, so that any rank and any resumed run agree.

    warmup-cosine grows in a straight line to `config.learning_rate` over the warmup, then falls along half a cosine
    that would reach 0 one update after the last. One update is made of `config.accumulate` iterations.
    """
    if config.lr_schedule == "constant":
        return config.learning_rate
    warmup, num_updates = (n // config.accumulate for n in (config.warmup_iterations, config.num_iterations))
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    done = (update - warmup) / (num_updates - warmup)
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


def are_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether every element of every gradient is a finite number."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    # A sum is cheap, and never finite when one of its terms is not; it can also overflow, so the rest is looked at.
    sums = [gradient.sum() for gradient in gradients]
    return not sums or bool(torch.stack(sums).isfinite().all()) or all(bool(g.isfinite().all()) for g in gradients)


def not_finite(iteration: int, loss: float, places: str | None, norm: float | None = None) -> str | None:
    """What is wrong with an iteration (counted from 0), in words; None when nothing is.

    places: where gradients are not finite, such as " of stage 1", None if nowhere. norm: of all gradients, where it is
    known.
    """
    wrong = [] if math.isfinite(loss) else [f"the loss is {loss}"]
    if places is not None:
        wrong.append(f"gradients{places} are not finite")
    elif norm is not None and not math.isfinite(norm):
        wrong.append(f"the norm of all gradients is {norm}")
    return f"iteration {iteration + 1}: {' and '.join(wrong)}" if wrong else None


def stopped(wrong: str) -> RunError:
    """The error that ends a run under `--on-nonfinite stop`."""
    return RunError(
        f"{wrong}; nothing was updated. Lower --learning-rate, or leave such updates out with --on-nonfinite skip"
    )


def left_out(iterations: int, accumulate: int, updates: int, first: str | None) -> str | None:
    """What a run says at its end when updates were left out; None when none was.

    first: what was wrong the first time, where it is known.
    """
    due = iterations // accumulate
    if updates == due:
        return None
    why = "a loss or a gradient was not finite" if first is None else f"first because of {first}"
    return f"left out {due - updates} of {due} updates, {why}"


def update_weights(
    optimizer: torch.optim.Optimizer, learning_rate: float | None, norm: float | None, max_norm: float | None
) -> None:
    """One update of the optimizer's parameters.

    learning_rate: its step size (None: as it is). norm: of all gradients of the model; needed with `max_norm`, to clip.
    """
    for group in optimizer.param_groups:
        if learning_rate is not None:
            group["lr"] = learning_rate
        if max_norm is not None:
            clip(group["params"], norm, max_norm)
    optimizer.step()
