"""What passes each boundary between stages: every stage works out its own outputs from the inputs it is promised."""

from collections.abc import Mapping, Sequence

import torch

from step0_monolith.model import Draw, run_layers
from step1_partition.stage import Stage
from step2_comms.contract import Message, Spec, from_json, specs_of, to_json
from step2_comms.world import World

Specs = tuple[Spec, ...]


def output_specs(stage: Stage, inputs: Specs, device: torch.device | str = "cpu") -> Specs:
    """Shapes, dtypes and gradient flags of the stage's outputs for such inputs, by running it once on zeros.

    Leaves buffers (running statistics), gradients and the random state as they were. Running the layers is the only
    way that holds for every module and under autocast.
    """
    zeros = (torch.zeros(s.shape, dtype=s.dtype, device=device).requires_grad_(s.requires_grad) for s in inputs)
    buffers = [buffer for module in stage.modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    with torch.random.fork_rng(devices=[] if torch.device(device).type == "cpu" else [device]):
        # Cloned, so that a first module that works in place does not meet a leaf.
        outputs = run_layers(stage.modules, tuple(x.clone() for x in zeros), stage.first_layer, Draw(0, 0, 0))
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
    return specs_of(outputs)


def agree_on_boundaries(
    world: World,
    stages: Mapping[int, Stage],
    rank_of_stage: Sequence[int],
    inputs: Sequence[Specs] | None,
    name: str,
) -> dict[int, list[Specs]]:
    """Tells and learns what passes the boundaries of this rank's stages; called on every rank.

    stages: this rank's, by stage number. inputs: what enters stage 0, for each microbatch; needed on its rank alone.
    name: of the pass. Boundary b lies before stage b. Returns, for each boundary of this
    rank, the tensors of each microbatch.
    """
    key = world.new_key(f"boundary/{name}")
    found: dict[int, list[Specs]] = {}
    # In ascending order of stages no rank waits for one that waits for it, even with several stages on a rank.
    for index in sorted(stages):
        if index == 0:
            found[0] = list(inputs)
        else:
            peer = rank_of_stage[index - 1]
            text = world.fetch(f"{key}/{index}", f"the shapes before stage {index}", peer)
            found[index] = [m.specs for m in from_json(text)]
        outputs = {specs: output_specs(stages[index], specs, world.device) for specs in set(found[index])}
        found[index + 1] = [outputs[specs] for specs in found[index]]
        script = [Message(str(m), specs) for m, specs in enumerate(found[index + 1])]
        world.store.set(f"{key}/{index + 1}", to_json(script))
    return found
