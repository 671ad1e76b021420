"""The backward of a stage in two parts: I, for its inputs, now; W, for its weights, when there is time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from step0_monolith.model import Tensors
from step1_partition.stage import Stage
from step6_schedules.late import Late, what_can_wait


def _add(parameter: Tensor, gradient: Tensor) -> None:
    """Adds as autograd does. One `addmm_` of the product into `.grad` would be faster, and round differently."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _version(x: Tensor | None) -> int:
    """Counts the writes to a tensor; autograd compares it in a whole backward."""
    return -1 if x is None else x._version


def _watch(late: Sequence[Late]) -> tuple[dict[int, Tensor], list]:
    """Hooks that note the gradient at each layer's product, by its place in `late`; and their handles.

    What `torch.autograd.grad` returns for such a place has not been through the hooks of the product's own output when
    the product's backward runs too; what arrives at the node has.
    """
    seen: dict[int, Tensor] = {}

    def note(index: int):
        return lambda gradients: seen.__setitem__(index, gradients[0])

    return seen, [layer.place.node.register_prehook(note(index)) for index, layer in enumerate(late)]


class Kept(NamedTuple):
    """What the W of one microbatch needs.

    late: for each `Late` layer (g, x's version, x, weight, bias), and not its place, which would hold the whole graph.
    ready: each parameter that cannot wait, with its gradient.
    """

    late: list[tuple[Tensor, int, Tensor | None, nn.Parameter | None, nn.Parameter | None]]
    ready: list[tuple[Tensor, Tensor]]


class SplitStage(Stage):
    """A stage whose backward runs whole (B, inherited) or in two parts (I, then W), each microbatch as the table says.

    The forward is the plain stage's. I asks autograd for the gradients of the inputs, and what nobody asks for is not
    computed. On its way it comes past each linear layer: the gradient there, and the layer's input, are all that the
    layer's W needs. Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241, section 2; their B is our I) run W where
    a rank would wait otherwise.
    """

    def __init__(self, modules: Sequence[nn.Module], first_layer: int = 0) -> None:
        super().__init__(modules, first_layer)
        self._kept: dict[int, Kept] = {}

    @property
    def in_flight(self) -> int:
        """Microbatches that have gone forward and wait for their backward, or for the second part of it."""
        return len(self._saved) + len(self._kept)

    def backward_input(self, microbatch: int, gradients: Tensors | None) -> Tensors:
        """Op I: takes and returns what `backward` does, adds to no parameter's gradient, and keeps what W needs.

        What only the gradients of the inputs needed (a ReLU's output, a dropout's mask) is let go of. The gradients
        of parameters that cannot wait (see `what_can_wait`) are computed here, for W to add. Raises RuntimeError when
        the microbatch has not gone forward.
        """
        if microbatch not in self._saved:
            raise RuntimeError(
                f"backward for the input of microbatch {microbatch}, but its forward has not run or is used up"
            )
        # BEGIN SOLUTION step6.split_backward
        received, outputs = self._saved.pop(microbatch)
        roots = [x for x in outputs if x.requires_grad]
        leaves = [x for x in received if x.requires_grad]
        late, others = what_can_wait(roots, leaves)
        wanted = [*(layer.place for layer in late), *others, *leaves]
        found: list[Tensor | None] = [None] * len(wanted)
        if roots and wanted:
            hooked, handles = _watch(late)
            found = list(torch.autograd.grad(roots, wanted, gradients, allow_unused=True))
            for handle in handles:
                handle.remove()
            for index, gradient in hooked.items():
                found[index] = gradient
        n, k = len(late), len(late) + len(others)
        self._kept[microbatch] = Kept(
            [(g, _version(layer.x), *layer[1:]) for g, layer in zip(found[:n], late, strict=True) if g is not None],
            [(x, g) for x, g in zip(others, found[n:k], strict=True) if g is not None],
        )
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found[k:], strict=True))
        # END SOLUTION

    def backward_weights(self, microbatch: int) -> None:
        """Op W: adds to the parameters' gradients, layer by layer, and lets go of each layer's tensors once used.

        This is not autograd's doing: hooks on the parameters of linear layers are not called, nor what any parameter
        would call after its gradient is accumulated. Raises RuntimeError when the backward for the input of the
        microbatch has not run, or when the input of a linear layer was overwritten after it.
        """
        if microbatch not in self._kept:
            raise RuntimeError(
                f"backward for the weights of microbatch {microbatch}, but its backward for the input has not run or "
                "is used up"
            )
        late, ready = self._kept.pop(microbatch)
        while late:
            g, version, x, weight, bias = late.pop()
            if _version(x) != version:
                raise RuntimeError(
                    f"backward for the weights of microbatch {microbatch}: the input of a linear layer was overwritten "
                    "since its backward for the input"
                )
            if weight is not None:
                _add(weight, g.t().mm(x))
            if bias is not None:
                _add(bias, g.sum(0))
        while ready:
            parameter, gradient = ready.pop()
            # A copy: in y = x + parameter, one tensor is the gradient of all three, and sums are formed in `.grad`.
            _add(parameter, gradient.clone() if parameter.grad is None else gradient)
