"""Forward and backward of one stage: where autograd is cut and joined again."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from step0_monolith.model import Draw, Tensors, is_random, run_layers


def _starts_in_place(modules: Sequence[nn.Module]) -> bool:
    first = next((m for module in modules for m in module.modules() if not list(m.children())), None)
    return bool(getattr(first, "inplace", False))


class Stage:
    """A contiguous slice of layers, with what its microbatches in flight need for their backward."""

    def __init__(self, modules: Sequence[nn.Module], first_layer: int = 0) -> None:
        self.modules = list(modules)
        self.first_layer = first_layer
        self._saved: dict[int, tuple[Tensors, Tensors]] = {}
        # A module that overwrites its input would overwrite a leaf that requires a gradient, which autograd refuses.
        self._copies_input = _starts_in_place(modules)
        self._draws = any(map(is_random, modules))

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in layer order; one that two modules share is there once."""
        return list({id(p): p for module in self.modules for p in module.parameters()}.values())

    @property
    def in_flight(self) -> int:
        """Microbatches that have gone forward and not yet backward."""
        return len(self._saved)

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        loss: Callable[..., Tensor] | None = None,
        draw: Draw | None = None,
    ) -> Tensors:
        """Runs the layers on one microbatch and keeps what its backward needs.

        inputs: one tensor (N, D) or several; the graph is cut here, so that a backward of this stage ends at them. An
        input that requires a gradient gets one. loss: given on the last stage, turns the outputs into the scalar that
        is returned instead of them. draw: the source of dropout's randomness. Returns the outputs, attached to this
        stage's graph: whoever takes them cuts.
        """
        # BEGIN SOLUTION step1.stage_forward
        received = tuple([x.detach().requires_grad_(x.requires_grad) for x in inputs])
        outputs = run_layers(self.modules, self._own(received), self.first_layer, draw if self._draws else None)
        if loss is not None:
            outputs = (loss(*outputs),)
        self._saved[microbatch] = (received, outputs)
        return outputs
        # END SOLUTION

    def backward(self, microbatch: int, gradients: Tensors | None) -> Tensors:
        """Adds to the parameters' gradients, forgets the microbatch, and returns the gradients of the inputs.

        gradients: of the outputs that require one, in their order; None where the output is the loss. Returns one
        gradient for each input that requires one, zeros where the stage did not use it. Raises RuntimeError when the
        microbatch has not gone forward.
        """
        if microbatch not in self._saved:
            raise RuntimeError(f"backward of microbatch {microbatch}, but its forward has not run or is used up")
        # BEGIN SOLUTION step1.stage_backward
        received, outputs = self._saved.pop(microbatch)
        roots = [x for x in outputs if x.requires_grad]
        if roots:
            torch.autograd.backward(roots, gradients)
        leaves = [x for x in received if x.requires_grad]
        return tuple([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves])
        # END SOLUTION

    @torch.no_grad()
    def evaluate(self, inputs: Tensors) -> Tensors:
        """Runs the layers on one microbatch in whatever mode they are in, and keeps nothing."""
        return run_layers(self.modules, self._own(inputs), self.first_layer)

    def _own(self, inputs: Tensors) -> Tensors:
        return tuple(x.clone() for x in inputs) if self._copies_input else inputs
