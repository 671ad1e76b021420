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
from torch.autograd.graph import Node, get_gradient_edge

# Autograd's names for a linear layer's product, with and without a bias: which of the node's inputs are the bias and
# the transposed weight, and where it keeps what it multiplied.
PRODUCTS = {"AddmmBackward0": (0, 2, "_saved_mat1"), "MmBackward0": (None, 1, "_saved_self")}


class Late(NamedTuple):
    """A linear layer whose gradients can wait: they follow from x and the gradient g at its output, (N, D_out).

    weight, bias: None where it has none, or where that one cannot wait. x: what it multiplied, (N, D_in), and version:
    how often x had been written to; both None where weight is.
    """

    weight: nn.Parameter | None
    x: Tensor | None
    version: int | None
    bias: nn.Parameter | None


def _walk(roots: Sequence[Tensor]) -> tuple[dict[Node, int], dict[Node, Tensor], list[tuple[Node, str, tuple]]]:
    """Looks once at each node of the graph that ends in the roots.

    Returns how often each is used in it; the tensors that the graph starts from, by the node that adds to their
    `.grad`; and the products that may be a linear layer's, each with its kind and its `next_functions`.
    """
    uses: dict[Node, int] = {}
    leaves: dict[Node, Tensor] = {}
    products: list[tuple[Node, str, tuple]] = []
    found = [get_gradient_edge(root).node for root in roots]
    for node in found:  # which grows while it is walked through
        if node in uses:
            uses[node] += 1
            continue
        uses[node] = 1
        kind = type(node).__name__
        if kind == "AccumulateGrad":
            leaves[node] = node.variable
            continue
        following = node.next_functions
        if kind in PRODUCTS:
            products.append((node, kind, following))
        for source, _ in following:
            if source is not None:
                found.append(source)
    return uses, leaves, products


def _take(node: Node | None, dim: int, uses: dict[Node, int], leaves: dict[Node, Tensor]) -> nn.Parameter | None:
    """Takes the parameter at a node, or behind autocast's cast of it, from the leaves, if its gradient can wait.

    It can when the parameter is used there and nowhere else, and has dim dimensions and no gaps between its elements.
    """
    if node not in leaves and type(node).__name__ == "ToCopyBackward0" and uses[node] == 1:
        node = node.next_functions[0][0]
    leaf = leaves.get(node)
    if (
        isinstance(leaf, nn.Parameter)
        and uses[node] == 1
        and leaf.dim() == dim
        and leaf.is_contiguous()
        and leaf.is_floating_point()
        # A bias of one element may be spread over the outputs: then its gradient is no sum over the rows alone.
        and leaf.numel() > 1
    ):
        return leaves.pop(node)
    return None


def what_can_wait(roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[dict[Node, Late], list[Tensor]]:
    """Looks for parameters in the graph between a stage's inputs and its roots.

    Returns the linear layers whose gradients can wait, wherever in a module one is called, by their product's node in
    autograd's graph; and the parameters whose gradients cannot: those of other modules (normalisation, embedding,
    convolution), and those used twice (tied), whose gradient is a sum that autograd forms in its own order.
    """
    uses, leaves, products = _walk(roots)
    late = {}
    for node, kind, following in products:
        bias_at, weight_at, saved = PRODUCTS[kind]
        # alpha and beta: a product that is scaled, torch.addmm(b, x, W, alpha=2), is no linear layer.
        if not getattr(node, "_saved_alpha", 1) == getattr(node, "_saved_beta", 1) == 1:
            continue
        weight = x = version = bias = None
        transposed = following[weight_at][0]
        if type(transposed).__name__ == "TBackward0" and uses[transposed] == 1:
            weight = _take(transposed.next_functions[0][0], 2, uses, leaves)
        if weight is not None:
            # Read where autograd saved it, x is checked: nobody may have overwritten it since.
            x = getattr(node, saved).detach()
            version = x._version
        if bias_at is not None:
            bias = _take(following[bias_at][0], 1, uses, leaves)
        if weight is not None or bias is not None:
            late[node] = Late(weight, x, version, bias)
    received = {id(x) for x in inputs}
    return late, [x for x in leaves.values() if id(x) not in received]
