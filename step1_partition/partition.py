"""Which layers belong to which stage: evenly, by hand, or by cost. A partition is a list of sizes."""

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from step0_monolith.model import run_layers
from step0_monolith.options import Options, UsageError, option, optional, whole


def _sizes(flag: str, value: str | Sequence[int]) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    convert = whole(-(10**9))
    try:
        sizes = tuple(convert(flag, part) for part in parts)
    except UsageError:
        sizes = ()
    if not sizes:
        raise UsageError(f"{flag} must be whole numbers such as 5,3,4,4, not {value!r}")
    if min(sizes) < 1:
        raise UsageError(f"{flag} {','.join(map(str, sizes))}: each stage needs at least 1 layer")
    return sizes


@dataclass(frozen=True)
class PartitionOptions(Options):
    """How layers are handed out."""

    layers_per_stage: tuple[int, ...] | None = option(
        None, optional(_sizes), "layers of each stage, such as 5,3,4,4 (default: evenly)"
    )


def _check_stages(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise UsageError(f"{num_stages} stages: there must be at least 1")
    if num_layers < num_stages:
        raise UsageError(
            f"{num_layers} layers cannot fill {num_stages} stages; raise --num-layers to at least {num_stages}, or use "
            f"fewer ranks or chunks"
        )


def evenly(num_layers: int, num_stages: int) -> list[int]:
    """Sizes that differ by at most 1, the larger ones first: 10 layers over 3 stages gives 4, 3, 3.

    Raises UsageError when there are fewer layers than stages: no stage may be empty.
    """
    _check_stages(num_layers, num_stages)
    # BEGIN SOLUTION step1.evenly
    size, longer = divmod(num_layers, num_stages)
    return [size + (stage < longer) for stage in range(num_stages)]
    # END SOLUTION


def by_hand(sizes: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """The given sizes, once they have been checked. Raises UsageError that says what length and sum must be."""
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes, default=0) < 1:
        raise UsageError(
            f"--layers-per-stage {','.join(map(str, sizes))} has {len(sizes)} numbers with sum {sum(sizes)}; it must "
            f"have {num_stages}, one a stage, each at least 1, with sum {num_layers}, the number of layers"
        )
    return list(sizes)


def partition(num_layers: int, num_stages: int, layers_per_stage: Sequence[int] | None = None) -> list[int]:
    """By hand where sizes are given, else evenly."""
    if layers_per_stage is None:
        return evenly(num_layers, num_stages)
    return by_hand(layers_per_stage, num_layers, num_stages)


def by_cost(costs: Sequence[float], num_stages: int) -> list[int]:
    """The contiguous split into non-empty stages whose dearest stage is cheapest; exact, in S·L² steps.

    costs: one number >= 0 a layer, any unit. Raises UsageError for fewer layers than stages, or a cost that is
    negative or not finite.
    """
    num_layers = len(costs)
    _check_stages(num_layers, num_stages)
    if any(not math.isfinite(cost) or cost < 0 for cost in costs) or not math.isfinite(sum(costs)):
        raise UsageError(f"costs must be at least 0 and their sum finite, not {list(costs)}")
    sums = [0.0, *itertools.accumulate(costs)]
    # best[n]: the dearest stage when the first n layers fill the stages so far; cuts: where the last of them began.
    best = [0.0, *[math.inf] * num_layers]
    cuts = []
    for stage in range(1, num_stages + 1):
        ends = range(num_layers + 1)
        cut = [max(range(n), key=lambda c: -max(best[c], sums[n] - sums[c]), default=0) for n in ends]
        best = [max(best[cut[n]], sums[n] - sums[cut[n]]) if n >= stage else math.inf for n in ends]
        cuts.append(cut)
    sizes, end = [], num_layers
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return sizes[::-1]


def bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first layer, one past the last) of each stage."""
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def split(modules: Sequence[nn.Module], sizes: Sequence[int]) -> list[list[nn.Module]]:
    """Hands out modules to stages.

    Raises UsageError when two stages would share a parameter or a buffer: each would train its own copy, and the
    copies would drift apart.
    """
    if sum(sizes) != len(modules) or min(sizes, default=0) < 1:
        raise UsageError(f"sizes {list(sizes)} must be at least 1 each and hand out all {len(modules)} modules")
    owner: dict[int, tuple[int, str]] = {}
    stages = [list(modules[start:stop]) for start, stop in bounds(sizes)]
    layer = 0
    for index, stage in enumerate(stages):
        for module in stage:
            tensors = itertools.chain(
                module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
            )
            for name, tensor in tensors:
                full = f"layer {layer}.{name}"
                other, other_name = owner.setdefault(id(tensor), (index, full))
                if other != index:
                    raise UsageError(
                        f"{other_name} (stage {other}) and {full} (stage {index}) are the same tensor; "
                        f"put both layers into one stage"
                    )
            layer += 1
    return stages


def measure_costs(modules: Sequence[nn.Module], inputs: Tensor, repeats: int = 5) -> list[float]:
    """Seconds of forward plus backward of each module on `inputs`, the median of `repeats`; leaves no gradients."""
    seconds: list[list[float]] = [[] for _ in modules]
    for _ in range(repeats):
        values = (inputs,)
        for index, module in enumerate(modules):
            start = time.perf_counter()
            leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in values)
            values = run_layers([module], leaves, index)
            grown = [x for x in values if x.requires_grad]
            sources = [x for x in (*leaves, *module.parameters()) if x.requires_grad]
            if grown and sources:
                torch.autograd.grad(grown, sources, [torch.ones_like(x) for x in grown], allow_unused=True)
            seconds[index].append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]
