"""python -m step1_partition.break_it: what detach, requires_grad and retain_grad are for, by leaving them out."""

import torch
from torch import nn

from step0_monolith.options import parse, run_program


def main() -> None:
    """Three experiments with two layers."""
    parse("python -m step1_partition.break_it", __doc__, {})
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4)

    print("1. without detach: the second stage's backward runs on into the first stage's graph")
    between = first(x)
    second(between).sum().backward()
    print(f"   the first stage already has a gradient: {first.weight.grad is not None}")
    try:
        between.backward(torch.ones_like(between))
    except RuntimeError as error:
        print(f"   its own backward then fails: {str(error).split('(')[0].strip()}")

    print("2. with detach but without requires_grad: there is nothing to send back")
    received = first(x).detach()
    second(received).sum().backward()
    print(f"   gradient of the received activation: {received.grad}")

    print("3. with both: the gradient that the second stage sends back")
    received = first(x).detach().requires_grad_()
    second(received).sum().backward()
    between = first(x)
    between.retain_grad()
    second(between).sum().backward()
    print(f"   equals what retain_grad shows in the uncut model: {torch.equal(received.grad, between.grad)}")


if __name__ == "__main__":
    run_program(main)
