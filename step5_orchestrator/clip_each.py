"""python -m step5_orchestrator.clip_each: clips each stage by its own norm, and shows what becomes of the gradient."""

import math

from torch import Tensor

from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.model import layers
from step0_monolith.options import parse, run_program
from step0_monolith.reference import forward_backward
from step0_monolith.update import clip, norm_of, squared_norms
from step1_partition.partition import evenly, split

NUM_STAGES = 4
MAX_NORM = 1.0


def angle(a: list[Tensor], b: list[Tensor]) -> float:
    """Degrees between two lists of gradients, each taken as one long vector."""
    product, aa, bb = (
        sum(float((x * y).sum()) for x, y in zip(*pair, strict=True)) for pair in ((a, b), (a, a), (b, b))
    )
    return math.degrees(math.acos(min(1.0, product / math.sqrt(aa * bb))))


def main() -> None:
    """Computes one batch's gradients in one process, and clips them in both ways."""
    parse("python -m step5_orchestrator.clip_each", __doc__, {})
    config = Config(dtype="float64")
    modules = layers(config)
    parameters = [p for module in modules for p in module.parameters()]
    forward_backward(modules, *batch(config, 0), config.num_microbatches)
    before = [p.grad.clone() for p in parameters]
    stages = split(modules, evenly(len(modules), NUM_STAGES))
    parts = [[p for module in stage for p in module.parameters()] for stage in stages]
    norms = [norm_of(squared_norms(part)) for part in parts]
    total = norm_of(squared_norms(parameters))
    print(f"norms of the stages: {', '.join(f'{norm:.3f}' for norm in norms)}; of all gradients: {total:.3f}")

    clip(parameters, total, MAX_NORM)
    turned = angle(before, [p.grad for p in parameters])
    print(f"clipped at {MAX_NORM:g} by the norm of all: every gradient times {MAX_NORM / total:.3f}")
    print(f"  the norm is then {norm_of(squared_norms(parameters)):.3f}, turned by {turned:.1f} degrees")

    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad.copy_(gradient)
    for part, norm in zip(parts, norms, strict=True):
        clip(part, norm, MAX_NORM)
    factors = ", ".join(f"{min(1.0, MAX_NORM / norm):.3f}" for norm in norms)
    print(f"each stage clipped at {MAX_NORM:g} by its own: times {factors}")
    turned = angle(before, [p.grad for p in parameters])
    print(f"  the norm is then {norm_of(squared_norms(parameters)):.3f}, turned by {turned:.1f} degrees")


if __name__ == "__main__":
    run_program(main)
