"""python -m step0_monolith.break_it: with PyTorch's default initialisation a deep model's first loss proves nothing."""

import torch
from torch import nn

from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.model import layers, run_layers
from step0_monolith.options import parse, run_program
from step0_monolith.reference import forward_backward


def with_default_initialisation(config: Config) -> list[nn.Module]:
    """The same layers, initialised as `nn.Linear` does by itself."""
    torch.manual_seed(config.seed)
    modules = layers(config)
    for module in modules:
        module.reset_parameters()
    return modules


def main() -> None:
    """Shows the spread of the logits and the first loss for right and wrong inputs, with both initialisations."""
    parse("python -m step0_monolith.break_it", __doc__, {})
    config = Config(num_layers=16)
    inputs, targets = batch(config, 0)
    wrong = {
        "right inputs": inputs,
        "zeros": torch.zeros_like(inputs),
        "negated": -inputs,
        "rows shifted": inputs.roll(1, 0),
    }
    for name, make in (("default", with_default_initialisation), ("Kaiming", layers)):
        with torch.no_grad():
            (logits,) = run_layers(make(config), (inputs,))
        print(f"{name} initialisation, 16 layers: logits vary by {logits.std(0).mean():.4f} over the batch")
        for what, x in wrong.items():
            print(f"   first loss with {what}: {forward_backward(make(config), x, targets, 8):.4f}")


if __name__ == "__main__":
    run_program(main)
