"""Loss and gradients of the whole model in one process: what every later step must equal, bit for bit."""

from collections.abc import Sequence

from torch import Tensor, nn

from step0_monolith.data import microbatches
from step0_monolith.loss import IGNORE_INDEX, batch_weight, loss_share, total
from step0_monolith.model import Draw, evaluating, is_random, run_layers


def forward_backward(
    modules: Sequence[nn.Module],
    inputs: Tensor,
    targets: Tensor,
    num_microbatches: int,
    *,
    seed: int = 0,
    iteration: int = 0,
    first_microbatch: int = 0,
    weight: int | None = None,
) -> Tensor:
    """Runs one batch forward and backward, microbatch by microbatch, and returns the batch's loss (a float64 scalar).

    Adds each parameter's gradient into `.grad`, in ascending order of the microbatches: the order that every schedule
    keeps, which is why their sums have the same bits. first_microbatch: the number of the first, for dropout's draws.
    weight: rows that the shares are divided by (default: those of this batch that count); where the batch is a piece
    of a larger one, the rows of the whole, and the loss is this piece's share of the whole's.
    """
    # BEGIN SOLUTION step0.forward_backward
    weight = batch_weight(targets) if weight is None else weight
    draws = any(map(is_random, modules))
    shares = []
    pieces = zip(microbatches(inputs, num_microbatches), microbatches(targets, num_microbatches), strict=True)
    for index, (piece, piece_targets) in enumerate(pieces, first_microbatch):
        (output,) = run_layers(modules, (piece,), draw=Draw(seed, iteration, index) if draws else None)
        share = loss_share(output, piece_targets, weight)
        if share.requires_grad:
            share.backward()
        shares.append(share.detach())
    return total(shares)
    # END SOLUTION


def evaluate(modules: Sequence[nn.Module], inputs: Tensor, targets: Tensor, num_microbatches: int) -> dict[str, float]:
    """`accuracy` (0..1) and `loss` over the given rows, in evaluation mode; leaves the modules as they were."""
    with evaluating(modules):
        pieces = microbatches(inputs, num_microbatches)
        outputs = [output for piece in pieces for output in run_layers(modules, (piece,))]
    return metrics(outputs, targets)


def metrics(outputs: Sequence[Tensor], targets: Tensor) -> dict[str, float]:
    """`accuracy` and `loss` from all microbatches' outputs, each (N, C), and all targets; ignored rows left out."""
    weight = batch_weight(targets)
    pieces = microbatches(targets, len(outputs))
    shares = [loss_share(output, piece, weight) for output, piece in zip(outputs, pieces, strict=True)]
    correct = sum(
        int(((output.argmax(1) == piece) & (piece != IGNORE_INDEX)).sum())
        for output, piece in zip(outputs, pieces, strict=True)
    )
    return {"accuracy": correct / weight, "loss": total(shares).item()}
