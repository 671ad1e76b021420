"""The model as a list of layers: layer i has the same weights wherever, and by whomever, it is built."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from step0_monolith.config import Config
from step0_monolith.seeds import generator_for, seed_for

Tensors = tuple[Tensor, ...]


class Layer(nn.Linear):
    """A linear layer with its ReLU: the unit that a partition hands out. (N, D_in) to (N, D_out)."""

    def __init__(self, in_features: int, out_features: int, relu: bool, dtype: torch.dtype, device=None) -> None:
        super().__init__(in_features, out_features, dtype=dtype, device=device)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """(N, D_in) to (N, D_out)."""
        x = super().forward(x)
        return torch.relu(x) if self.relu else x


def layer(config: Config, index: int) -> Layer:
    """Builds layer `index`, on the CPU; its weights depend on the seed and the index alone.

    Kaiming initialisation (He et al. 2015, arXiv 1502.01852) keeps the size of the activations from layer to layer.
    With PyTorch's default a deep stack of ReLU layers outputs a constant at the start, and then a wrong pipeline
    shows the right first loss. Weights are drawn in float32 and rounded, so that every dtype starts at the same place.
    """
    n_in, n_out = config.shape_of_layer(index)
    last = index == config.num_layers - 1
    # On "meta", where nn.Linear's own initialisation takes no time and does not move the global generator.
    built = Layer(n_in, n_out, relu=not last, dtype=config.torch_dtype, device="meta")
    weight = torch.empty(n_out, n_in)
    generator = generator_for(config.seed, "layer", index)
    nn.init.kaiming_normal_(weight, nonlinearity="linear" if last else "relu", generator=generator)
    built.weight = nn.Parameter(weight.to(config.torch_dtype))
    built.bias = nn.Parameter(torch.zeros(n_out, dtype=config.torch_dtype))
    return built


def layers(config: Config, start: int = 0, stop: int | None = None) -> list[Layer]:
    """Layers start .. stop-1 (all by default), without building the others."""
    return [layer(config, index) for index in range(start, config.num_layers if stop is None else stop)]


class Draw(NamedTuple):
    """What the random numbers inside a layer (dropout) depend on, besides the layer's own index."""

    seed: int
    iteration: int
    microbatch: int


def is_random(module: nn.Module) -> bool:
    """Whether a module's forward in training draws random numbers, as far as torch's own modules go."""
    return any(
        isinstance(m, nn.modules.dropout._DropoutNd | nn.RReLU) or getattr(m, "dropout", 0.0) for m in module.modules()
    )


@contextlib.contextmanager
def _seeded(draw: Draw, index: int, device: torch.device):
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_for(draw.seed, "draw", draw.iteration, draw.microbatch, index))
        yield


@contextlib.contextmanager
def evaluating(modules: Sequence[nn.Module]):
    """Evaluation mode and no gradients inside; every module has its own mode again afterwards."""
    before = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in before:
            module.training = mode


def run_layers(
    modules: Sequence[nn.Module], inputs: Tensors, first_layer: int = 0, draw: Draw | None = None
) -> Tensors:
    """Runs modules one after another; each takes and returns a tensor, or a tuple where several travel together.

    With `draw`, a layer that draws random numbers starts from a seed of its own (seed, iteration, microbatch, global
    index), so that a dropout mask is the same in whatever process the layer runs. The global generator is untouched.
    Callers whose modules draw none leave `draw` out: asking each module takes a tenth of a small layer's time.
    """
    values = inputs
    for index, module in enumerate(modules, first_layer):
        if draw is not None and module.training and is_random(module):
            with _seeded(draw, index, values[0].device):
                result = module(*values)
        else:
            result = module(*values)
        values = result if isinstance(result, tuple) else (result,)
    return values
