"""What cutting a batch into microbatches changes for batch normalisation."""

import warnings
from collections.abc import Sequence

from torch import nn

from step0_monolith.options import UsageError


def check_batch_norm(modules: Sequence[nn.Module], microbatch_sizes: Sequence[int], first_layer: int = 0) -> None:
    """Warns where batch normalisation will see microbatches, and refuses microbatches that it cannot normalise.

    Raises UsageError for a microbatch of one row. The result still equals the monolith's run with the same
    microbatches; it differs from a run on whole batches.
    """
    for index, module in enumerate(modules, first_layer):
        if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in module.modules()):
            continue
        if min(microbatch_sizes) < 2:
            raise UsageError(
                f"layer {index} normalises over the rows of a microbatch, and microbatches of {list(microbatch_sizes)} "
                f"rows leave it one row alone; lower --num-microbatches so that each has at least 2"
            )
        warnings.warn(
            f"layer {index} uses batch normalisation: its mean and variance are those of each microbatch, not of the "
            f"whole batch, and its running statistics move {len(microbatch_sizes)} times an iteration",
            stacklevel=2,
        )
