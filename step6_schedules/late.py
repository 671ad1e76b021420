"""Which parameters' gradients can wait: those of linear layers, found in autograd's graph.

Every result of a differentiable operation holds a node (`grad_fn`), and each node names those that its gradients go to
(`next_functions`). For y = linear(x, W, b) that is

    AddmmBackward0 -> AccumulateGrad(b), the node of x, TBackward0 -> AccumulateGrad(W)

so that an AddmmBackward0 whose last input ends in a parameter is a linear layer, and the gradient that arrives at it,
with the x that it keeps, is all that W's and b's gradients need.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# Autograd's names for a linear layer's product, with and without a bias: which of the node's inputs are the bias and
# the transposed weight, and where it keeps what it multiplied.
PRODUCTS = {"AddmmBackward0": (0, 2, "_saved_mat1"), "MmBackward0": (None, 1, "_saved_self")}


class Late(NamedTuple):
    """A linear layer whose weight's and bias's gradients can wait: they follow from the gradient g at its output.

    place: its product in autograd's graph; asking `torch.autograd.grad` for it gives g, (N, D_out). x: what it
    multiplied, (N, D_in). weight, bias: None where it has none, or where that one cannot wait.
    """

    place: GradientEdge
    x: Tensor | None
    weight: nn.Parameter | None
    bias: nn.Parameter | None


def _uses(roots: Sequence[Tensor]) -> dict[Node, int]:
    """All nodes of the graph that ends in the roots, with the number of times each is used in it."""
    uses: dict[Node, int] = {}
    found = [get_gradient_edge(root).node for root in roots]
    for node in found:  # which grows while it is walked through
        if node in uses:
            uses[node] += 1
        else:
            uses[node] = 1
            found += [following for following, _ in node.next_functions if following is not None]
    return uses


def _kind(node: Node | None) -> str:
    return type(node).__name__


def _parameter(node: Node | None, uses: dict[Node, int]) -> nn.Parameter | None:
    """The parameter at a node, or behind autocast's cast of it, if it is used there and nowhere else."""
    if _kind(node) == "ToCopyBackward0" and uses[node] == 1:
        node = node.next_functions[0][0]
    if _kind(node) == "AccumulateGrad" and uses[node] == 1:
        leaf = node.variable
        return leaf if isinstance(leaf, nn.Parameter) and leaf.is_floating_point() else None
    return None


def _late(node: Node, uses: dict[Node, int]) -> Late:
    bias_at, weight_at, saved = PRODUCTS[_kind(node)]
    weight = x = bias = None
    transposed = node.next_functions[weight_at][0]
    if _kind(transposed) == "TBackward0" and uses[transposed] == 1:
        weight = _parameter(transposed.next_functions[0][0], uses)
        if weight is not None and not weight.is_contiguous():
            weight = None
    if weight is not None:
        # Read where autograd saved it, x is checked: nobody may have overwritten it since.
        x = getattr(node, saved).detach()
    if bias_at is not None:
        bias = _parameter(node.next_functions[bias_at][0], uses)
        if bias is not None and (bias.dim() != 1 or bias.numel() == 1):
            bias = None  # one that may be spread over the outputs: its gradient is no sum over the rows alone
    return Late(GradientEdge(node, 0), x, weight, bias)


def what_can_wait(roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[list[Late], list[Tensor]]:
    """Looks for parameters in the graph between a stage's inputs and its roots.

    Returns the linear layers whose gradients can wait, wherever in a module one is called, and the parameters whose
    gradients cannot: those of other modules (normalisation, embedding, convolution), and those used twice (tied),
    whose gradient is a sum that autograd forms in its own order.
    """
    uses = _uses(roots)
    leaves = {id(node.variable): node.variable for node in uses if _kind(node) == "AccumulateGrad"}
    late = [
        _late(node, uses)
        for node in uses
        # alpha and beta: a product that is scaled, torch.addmm(b, x, W, alpha=2), is no linear layer.
        if _kind(node) in PRODUCTS and getattr(node, "_saved_alpha", 1) == getattr(node, "_saved_beta", 1) == 1
    ]
    # What is left are the parameters whose gradients cannot wait.
    for settled in (*inputs, *(x for layer in late for x in (layer.weight, layer.bias))):
        leaves.pop(id(settled), None)
    return [layer for layer in late if layer.weight is not None or layer.bias is not None], list(leaves.values())
