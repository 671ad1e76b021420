"""The loss of a microbatch as its share of the batch's loss: shares add up, whatever the sizes of the pieces."""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100


def batch_weight(targets: Tensor) -> int:
    """Rows of the whole batch that count (a target of -100 is ignored); at least 1, so that nothing divides by 0."""
    return max(1, int((targets != IGNORE_INDEX).sum()))


def loss_share(output: Tensor, targets: Tensor, weight: int) -> Tensor:
    """What a microbatch adds to the batch's mean cross-entropy: the sum over its rows, divided by the batch's weight.

    output (N, C), targets (N,), weight from `batch_weight` of the whole batch. A mean over each microbatch, averaged,
    would weigh rows differently as soon as the pieces differ in size or in ignored rows. Computed in float32 where the
    output is narrower. A microbatch without any row that counts adds 0, not NaN.
    """
    output = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    return F.cross_entropy(output, targets, reduction="sum", ignore_index=IGNORE_INDEX) / weight


def total(shares: list[Tensor]) -> Tensor:
    """The batch's loss, a float64 scalar on the CPU: the shares added in ascending order of the microbatches."""
    result = 0.0
    # Read all at once: each read of a GPU's number would wait for the GPU.
    for share in torch.stack([share.detach() for share in shares]).tolist():
        result += share
    return torch.tensor(result, dtype=torch.float64)
