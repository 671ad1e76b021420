"""One activation there, one gradient back: two stages on two ranks, compared with the uncut model."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from step0_monolith.loss import batch_weight, loss_share
from step0_monolith.model import Tensors
from step0_monolith.reference import forward_backward
from step1_partition.stage import Stage
from step2_comms.contract import Message, Spec
from step2_comms.p2p import Messages

PASS = "ping-pong"
ACTIVATION, GRADIENT = "activation", "gradient"


class Received(NamedTuple):
    """What one rank got: the activation and the loss on rank 1; the activation's gradient, and no loss, on rank 0."""

    tensors: Tensors
    loss: Tensor | None = None


def agree(messages: Messages, activation: Spec) -> None:
    """Both ranks agree on what will travel: one activation to rank 1, and its gradient to rank 0.

    activation: the shape (N, D) and dtype at the cut. Raises ContractError on the rank that was told otherwise.
    """
    there = [Message(ACTIVATION, (activation._replace(requires_grad=True),))]
    back = [Message(GRADIENT, (activation._replace(requires_grad=False),))]
    messages.channel("forward", 0, 1).agree(there, PASS)
    messages.channel("backward", 1, 0).agree(back, PASS)
    messages.begin(PASS)


def ping_pong(messages: Messages, stage: Stage, rows: Tensor | None, targets: Tensor | None) -> Received:
    """One microbatch (number 0) through the stages of ranks 0 and 1, and its gradient back.

    stage: this rank's own. rows (N, 64): used on rank 0. targets (N,): used on rank 1, whose loss is the mean over
    the N rows. Afterwards the parameters of both stages have their gradients. Call `agree` first. Raises RunError that
    names the root when the other rank is lost or too late.
    """
    # BEGIN SOLUTION step3.ping_pong
    if messages.world.rank == 0:
        messages.send_forward(ACTIVATION, stage.forward(0, (rows,)))
        gradients = messages.recv_backward(GRADIENT)
        stage.backward(0, gradients)
        return Received(gradients)
    activations = messages.recv_forward(ACTIVATION)
    mean = partial(loss_share, targets=targets, weight=batch_weight(targets))
    (loss,) = stage.forward(0, activations, loss=mean)
    messages.send_backward(GRADIENT, stage.backward(0, None))
    return Received(activations, loss.detach())
    # END SOLUTION


class Uncut(NamedTuple):
    """The same microbatch through the model in one piece: what ping-pong must equal, bit for bit."""

    activation: Tensor
    gradient: Tensor
    loss: Tensor
    parameter_gradients: list[Tensor]


def uncut(modules: Sequence[nn.Module], cut: int, rows: Tensor, targets: Tensor) -> Uncut:
    """Runs step 0's reference on all `modules`, and looks at the tensor between modules cut-1 and cut."""
    seen = []

    def look(module: nn.Module, inputs: Tensors, output: Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    hook = modules[cut - 1].register_forward_hook(look)
    loss = forward_backward(modules, rows, targets, 1)
    hook.remove()
    (between,) = seen
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    return Uncut(between.detach(), between.grad, loss, gradients)


def compare(received: Received, stage: Stage, expected: Uncut) -> dict[str, bool]:
    """What this rank received and computed, each by name, and whether it has the uncut model's bits."""
    parameters = stage.parameters()
    if received.loss is None:
        found = {"the gradient that rank 0 received": torch.equal(*received.tensors, expected.gradient)}
        expected_gradients = expected.parameter_gradients[: len(parameters)]
    else:
        found = {
            "the activation that rank 1 received": torch.equal(*received.tensors, expected.activation),
            # The reference adds up losses in float64; here there is one, so that its value is the same number.
            "the loss on rank 1": torch.equal(received.loss.double(), expected.loss),
        }
        expected_gradients = expected.parameter_gradients[-len(parameters) :]
    for index, (parameter, gradient) in enumerate(zip(parameters, expected_gradients, strict=True)):
        name = f"the gradient of parameter {index} of stage {0 if received.loss is None else 1}"
        found[name] = parameter.grad is not None and torch.equal(parameter.grad, gradient)
    return found
