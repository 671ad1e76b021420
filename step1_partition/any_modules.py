"""python -m step1_partition.any_modules: stages of other modules than this course's layers, against the same uncut."""

import torch
from torch import nn

from step0_monolith.data import microbatches
from step0_monolith.loss import batch_weight, loss_share
from step0_monolith.model import Draw
from step0_monolith.options import parse, run_program
from step0_monolith.reference import forward_backward
from step1_partition.partition import bounds, split
from step1_partition.stage import Stage


def build() -> list[nn.Module]:
    """Word numbers in, classes out: an embedding, dropout, a frozen layer, a normalisation."""
    torch.manual_seed(0)
    modules = [nn.Embedding(50, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 10)]
    modules[2].requires_grad_(False)
    return modules


def main() -> None:
    """One batch of 7 rows in 3 microbatches through 3 stages, and through the uncut modules."""
    parse("python -m step1_partition.any_modules", __doc__, {})
    words, targets = torch.arange(7) * 7, torch.arange(7)
    whole, cut, sizes = build(), build(), [2, 2, 2]
    stages = [Stage(part, start) for part, (start, _) in zip(split(cut, sizes), bounds(sizes), strict=True)]
    expected = forward_backward(whole, words, targets, 3)

    weight, loss = batch_weight(targets), torch.zeros((), dtype=torch.float64)
    for m, (piece, labels) in enumerate(zip(microbatches(words, 3), microbatches(targets, 3), strict=True)):
        values, draw = (piece,), Draw(0, 0, m)
        for stage in stages[:-1]:
            values = stage.forward(m, values, draw=draw)
        (share,) = stages[-1].forward(m, values, loss=lambda x, t=labels: loss_share(x, t, weight), draw=draw)
        loss += share.detach()
        gradients = None
        for stage in reversed(stages):
            gradients = stage.backward(m, gradients)
        if m == 0:
            print(f"whole numbers enter stage 0, and {len(gradients)} gradients come back from it")
    print(f"loss {loss.item():.4f}, equal: {torch.equal(loss, expected)}")
    for index, (mine, theirs) in enumerate(zip(cut, whole, strict=True)):
        grads = [(p.grad, q.grad) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True)]
        frozen = all(a is None and b is None for a, b in grads)
        if grads:
            same = "no gradient, it is frozen" if frozen else f"equal: {all(torch.equal(a, b) for a, b in grads)}"
            print(f"layer {index}, {type(mine).__name__}: {same}")


if __name__ == "__main__":
    run_program(main)
