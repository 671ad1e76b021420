"""Any tensors to rank 1 and back, checked value by value on both ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from step0_monolith.model import Tensors
from step0_monolith.options import RunError
from step2_comms.contract import Message, specs_of
from step2_comms.p2p import Messages

PASS = "round trip"
THERE, BACK = "tensors there", "tensors back"


def samples() -> Tensors:
    """Tensors of many kinds, the same on every rank: transposed, strided, a scalar, an empty one, NaN, six dtypes."""
    grid = torch.arange(12.0).reshape(3, 4)
    return (
        grid.t(),
        grid[:, ::2],
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.tensor([0.0, -0.0, float("inf"), float("nan")]),
        torch.arange(1000).to(torch.bfloat16),
        torch.arange(-5, 5),
        torch.tensor([True, False, True]),
        torch.arange(256, dtype=torch.uint8),
    )


def round_trip(messages: Messages, tensors: Sequence[Tensor]) -> int:
    """Sends tensors from rank 0 to rank 1 and back, and returns how many values were checked on this rank.

    Both ranks give the same tensors: rank 1 compares what arrives with its own, because rank 0 alone could not tell
    an error on the way there that the way back undoes (bfloat16 read as float16 comes back as it went). Raises
    RunError that says which value differs.
    """
    specs = specs_of(tensors)
    messages.channel("forward", 0, 1).agree([Message(THERE, specs)], PASS)
    messages.channel("backward", 1, 0).agree([Message(BACK, specs)], PASS)
    messages.begin(PASS)
    if messages.world.rank == 0:
        messages.send_forward(THERE, tensors)
        received = messages.recv_backward(BACK)
    else:
        received = messages.recv_forward(THERE)
        messages.send_backward(BACK, received)
    for index, (tensor, came) in enumerate(zip(tensors, received, strict=True)):
        check_equal(f"tensor {index} of the round trip, on rank {messages.world.rank}", tensor, came)
    return sum(tensor.numel() for tensor in tensors)


def check_equal(what: str, sent: Tensor, received: Tensor) -> None:
    """Raises RunError unless both have the same shape, dtype and bits; the error counts the values that differ.

    Bits, not values: NaN equals itself here, and 0.0 differs from -0.0.
    """
    if sent.shape != received.shape or sent.dtype != received.dtype:
        raise RunError(
            f"{what}: sent {tuple(sent.shape)} {sent.dtype}, received {tuple(received.shape)} {received.dtype}"
        )
    bytes_sent, bytes_received = _bytes(sent), _bytes(received.to(sent.device))
    if torch.equal(bytes_sent, bytes_received):
        return
    wrong = (bytes_sent != bytes_received).any(1).nonzero().flatten().tolist()
    first = wrong[0]
    raise RunError(
        f"{what}: {len(wrong)} of {sent.numel()} values differ, the first at position {first}: "
        f"sent {sent.flatten()[first].item()}, received {received.flatten()[first].item()}"
    )


def _bytes(tensor: Tensor) -> Tensor:
    """One row of bytes a value."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
