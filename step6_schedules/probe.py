"""What a stage's forward leaves behind for its backward, in bytes, found in the first iteration of a run."""

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from step0_monolith.model import Draw, Tensors
from step1_partition.stage import Stage
from step6_schedules.ledger import Ledger


class Probe:
    """Stands in for a stage's `forward` until each microbatch has gone through once, and then takes itself away.

    num_bytes: for each microbatch the bytes of what autograd has saved and was not there before: what the stage
    received, and what its layers kept; its parameters are not counted, and nothing twice.
    """

    def __init__(self, stage: Stage, num_microbatches: int) -> None:
        self._stage, self._run = stage, stage.forward
        self._left = set(range(num_microbatches))
        self.num_bytes = [0] * num_microbatches
        stage.forward = self._forward

    def _forward(
        self,
        microbatch: int,
        inputs: Tensors,
        *,
        loss: Callable[..., Tensor] | None = None,
        draw: Draw | None = None,
    ) -> Tensors:
        ledger = Ledger(list(self._stage.parameters()))
        with saved_tensors_hooks(lambda tensor: _noted(ledger, tensor), lambda tensor: tensor):
            outputs = self._run(microbatch, inputs, loss=loss, draw=draw)
        self.num_bytes[microbatch] = ledger.held
        self._left.discard(microbatch)
        if not self._left:
            del self._stage.forward
        return outputs


def _noted(ledger: Ledger, tensor: Tensor) -> Tensor:
    ledger.note(tensor)
    return tensor
