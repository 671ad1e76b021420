"""python -m step1_partition: cuts the model into stages and runs them by hand, in one process."""

from dataclasses import dataclass
from functools import partial

import torch

from step0_monolith.config import Config
from step0_monolith.data import batch, microbatches
from step0_monolith.loss import batch_weight, loss_share, total
from step0_monolith.model import layers
from step0_monolith.options import Options, option, parse, run_program, whole
from step0_monolith.reference import forward_backward
from step1_partition.partition import PartitionOptions, bounds, by_cost, measure_costs, partition, split
from step1_partition.stage import Stage


@dataclass(frozen=True)
class StageOptions(Options):
    """How many stages one process plays."""

    num_stages: int = option(4, whole(1), "stages to cut the model into")


CONFIG = ("num_layers", "width", "batch_size", "num_microbatches", "seed", "data", "dtype", "threads")


def run_by_hand(stages: list[Stage], inputs: torch.Tensor, targets: torch.Tensor, num_microbatches: int):
    """One batch through all stages and back, one microbatch after another; returns the batch's loss."""
    weight = batch_weight(targets)
    shares = []
    pieces = zip(microbatches(inputs, num_microbatches), microbatches(targets, num_microbatches), strict=True)
    for index, (piece, piece_targets) in enumerate(pieces):
        values = (piece,)
        for stage in stages[:-1]:
            values = stage.forward(index, values)
        (share,) = stages[-1].forward(index, values, loss=partial(loss_share, targets=piece_targets, weight=weight))
        shares.append(share)
        gradients = None
        for stage in reversed(stages):
            gradients = stage.backward(index, gradients)
    return total(shares)


def main() -> None:
    takes = {Config: CONFIG, StageOptions: None, PartitionOptions: None}
    config, stage_options, options = parse("python -m step1_partition", __doc__, takes)
    torch.set_num_threads(config.threads)
    num_stages = stage_options.num_stages
    sizes = partition(config.num_layers, num_stages, options.layers_per_stage)
    inputs, targets = batch(config, 0)

    whole_model, cut_model = layers(config), layers(config)
    costs = measure_costs(layers(config), microbatches(inputs, config.num_microbatches)[0])
    best = by_cost(costs, num_stages)
    print(f"layers a stage: {sizes}; by measured cost it would be {best}")
    shares = [max(sum(costs[start:stop]) for start, stop in bounds(cut)) / sum(costs) for cut in (sizes, best)]
    print(f"the dearest stage takes {shares[0]:.0%} of the time, and would take {shares[1]:.0%}")
    for index, (start, stop) in enumerate(bounds(sizes)):
        count = sum(p.numel() for layer in cut_model[start:stop] for p in layer.parameters())
        print(f"stage {index}: layers {start}..{stop - 1}, {count:,} parameters")

    starts = [start for start, _ in bounds(sizes)]
    stages = [Stage(part, start) for part, start in zip(split(cut_model, sizes), starts, strict=True)]
    expected = forward_backward(whole_model, inputs, targets, config.num_microbatches)
    loss = run_by_hand(stages, inputs, targets, config.num_microbatches)
    print(f"loss {loss.item():.6f}, the monolith's {expected.item():.6f}, equal: {torch.equal(loss, expected)}")
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(
            (p for stage in stages for p in stage.parameters()),
            (p for layer in whole_model for p in layer.parameters()),
            strict=True,
        )
    ]
    equal = sum(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
    print(f"gradients with the monolith's bits: {equal} of {len(pairs)}")


if __name__ == "__main__":
    run_program(main)
