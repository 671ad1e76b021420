"""A rank's share of the model, built without building the rest."""

from collections.abc import Sequence

import torch

from step0_monolith.config import Config
from step0_monolith.model import layers
from step1_partition.partition import bounds, partition
from step1_partition.stage import Stage


def shard(
    config: Config,
    num_stages: int,
    stage: int,
    layers_per_stage: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    stage_class: type[Stage] = Stage,
) -> Stage:
    """Builds stage `stage` of `num_stages`, on `device`, with the very weights that the monolith has there.

    stage_class: what to build, Stage or a class of its kind. Raises UsageError when the layers cannot be shared out so.
    """
    sizes = partition(config.num_layers, num_stages, layers_per_stage)
    # BEGIN SOLUTION step4.shard
    start, stop = bounds(sizes)[stage]
    return stage_class([layer.to(device) for layer in layers(config, start, stop)], first_layer=start)
    # END SOLUTION


def size_of(stage: Stage) -> tuple[int, int]:
    """How many parameters the stage has, and their bytes."""
    parameters = stage.parameters()
    return sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)
