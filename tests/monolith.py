"""The monolith that every step is compared with, and the comparison: equal means equal bits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.model import layers
from step0_monolith.reference import forward_backward
from step0_monolith.result import weights_sha256
from step0_monolith.train import train

# Few and narrow layers, and a batch that no number of microbatches but 1 divides evenly.
SMALL = {"num_layers": 9, "width": 16, "batch_size": 13, "num_iterations": 5, "num_microbatches": 4}


def small(**changes) -> Config:
    return Config(**{**SMALL, **changes})


def named(modules: Iterable[nn.Module], first_layer: int = 0, gradients: bool = False) -> dict[str, Tensor]:
    """Parameters, or their gradients, by global layer name such as `3.weight`."""
    return {
        f"{index}.{name}": (parameter.grad if gradients else parameter).detach().cpu().clone()
        for index, module in enumerate(modules, first_layer)
        for name, parameter in module.named_parameters()
        if not gradients or parameter.grad is not None
    }


@dataclass(frozen=True)
class Monolith:
    """Losses of all iterations, the first batch's gradients, and the final parameters, by layer name."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    weights_sha256: str


@cache
def monolith(config: Config) -> Monolith:
    """What the monolith does with a config."""
    fresh = layers(config)
    forward_backward(fresh, *batch(config, 0), config.num_microbatches, seed=config.seed)
    trained = train(config)
    parameters = [p for layer in trained.layers for p in layer.parameters()]
    return Monolith(
        trained.losses, named(fresh, gradients=True), named(trained.layers), weights_sha256(parameters)
    )  # fmt: skip


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' tensors as one; no name may come from two ranks."""
    whole: dict[str, Tensor] = {}
    for rank, part in enumerate(parts):
        twice = whole.keys() & part.keys()
        assert not twice, f"rank {rank} also has {sorted(twice)}"
        whole.update(part)
    return whole


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> int:
    """Every expected tensor is compared exactly once; returns how many. Comparing nothing fails."""
    assert expected, "there is nothing to compare with"
    assert found.keys() == expected.keys(), f"names differ: {sorted(found.keys() ^ expected.keys())}"
    for name, tensor in expected.items():
        assert tensor.numel() > 0, f"{name} is empty"
        assert found[name].dtype == tensor.dtype, f"{name} is {found[name].dtype}, not {tensor.dtype}"
        assert found[name].shape == tensor.shape, f"{name} is {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
        if not torch.equal(found[name], tensor):
            difference = (found[name].double() - tensor.double()).abs()
            place = int(difference.argmax())
            raise AssertionError(
                f"{name} differs in {int((difference != 0).sum())} of {tensor.numel()} elements, most at {place}: "
                f"{found[name].flatten()[place].item()!r}, not {tensor.flatten()[place].item()!r}"
            )
    return len(expected)
