"""The backward of a stage in two parts: I, for its inputs, now; W, for its weights, when there is time."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from step0_monolith.model import Tensors
from step1_partition.stage import Stage
from step6_schedules.late import Late, what_can_wait

# Bytes from which a tensor's memory, once freed, may go back to the system. It comes back page by page, filled with
# zeros, which for a weight's gradient takes as long as the product that is written there.
LARGE = 2**20


def _add(parameter: Tensor, gradient: Tensor) -> None:
    """Adds as autograd does. One `addmm_` of the product into `.grad` would be faster, and round differently."""
    if gradient.dtype != parameter.dtype:
        gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _watch(nodes: Collection[Node]) -> list[list]:
    """Hooks that note the gradients that arrive at each node, a tuple, in a list of its own; they go with the graph.

    What `torch.autograd.grad` returns for such a place has not been through the hooks of the product's own output when
    the product's backward runs too; what arrives at the node has.
    """
    arrived = [[] for _ in nodes]
    for node, seen in zip(nodes, arrived, strict=True):
        node.register_prehook(seen.append)
    return arrived


class Kept(NamedTuple):
    """What the W of one microbatch needs.

    late: for each linear layer that waits, the gradient at its output and what else its gradients follow from. ready:
    each parameter that cannot wait, with its gradient.
    """

    late: list[tuple[Tensor, Late]]
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
        self._room: Tensor | None = None  # where large products are formed, one after another

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
        wanted = [*(GradientEdge(node, 0) for node in late), *others, *leaves]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        arrived = _watch(late)
        if roots and wanted:
            found = torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
        n, k = len(late), len(late) + len(others)
        # Taken out of the lists, which the graph holds as long as anybody holds an output.
        at_products = [seen.pop()[0] if seen else g for seen, g in zip(arrived, found[:n], strict=True)]
        self._kept[microbatch] = Kept(
            [(g, layer) for g, layer in zip(at_products, late.values(), strict=True) if g is not None],
            [(x, g) for x, g in zip(others, found[n:k], strict=True) if g is not None],
        )
        return tuple([torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found[k:], strict=True)])
        # END SOLUTION

    def backward_weights(self, microbatch: int) -> None:
        """Op W: adds to the parameters' gradients, layer by layer, and lets go of each layer's tensors once used.

        This is not autograd's doing: hooks on the parameters of linear layers are not called, nor what any parameter
        would call after its gradient is accumulated. Raises RuntimeError when the backward for the input of the
        microbatch has not run, or when the input of a linear layer was overwritten since the forward.
        """
        if microbatch not in self._kept:
            raise RuntimeError(
                f"backward for the weights of microbatch {microbatch}, but its backward for the input has not run or "
                "is used up"
            )
        late, ready = self._kept.pop(microbatch)
        while late:
            g, (weight, x, version, bias) = late.pop()
            if weight is not None:
                if x._version != version:
                    raise RuntimeError(
                        f"backward for the weights of microbatch {microbatch}: the input of a linear layer was "
                        "overwritten since its forward"
                    )
                self._add_product(weight, g, x)
            if bias is not None:
                _add(bias, g.sum(0))
        while ready:
            parameter, gradient = ready.pop()
            # A copy: in y = x + parameter, one tensor is the gradient of all three, and sums are formed in `.grad`.
            _add(parameter, gradient.clone() if parameter.grad is None else gradient)

    def _add_product(self, weight: Tensor, g: Tensor, x: Tensor) -> None:
        """Adds g^T x, (D_out, D_in). A large one on the CPU is formed where the one before was, see LARGE."""
        # The first product becomes `.grad`. Autocast casts g and x, but not where the result has its place already.
        if weight.grad is None or weight.nbytes < LARGE or not weight.is_cpu or torch.is_autocast_enabled("cpu"):
            _add(weight, g.t().mm(x))
            return
        room = self._room
        if room is not None and room.shape == weight.shape and room.dtype == g.dtype:
            torch.mm(g.t(), x, out=room)
        else:
            self._room = room = g.t().mm(x)
        _add(weight, room)
