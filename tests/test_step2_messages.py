"""Step 2: messages arrive right, or both ends say why not."""

import pytest
import torch

from step2_comms.contract import Message, Spec
from step2_comms.p2p import Messages

FORWARD = [("forward", 0, 1), ("backward", 1, 0)]


def exchange(world, sent, agreed):
    """Rank 0 sends tensors under a contract made for others; returns what rank 1 received."""
    messages = Messages(world, FORWARD)
    channel = messages.channel("forward", 0, 1)
    channel.agree([Message("x", agreed)] if world.rank == 0 else None)
    if world.rank == 0:
        messages.send_forward("x", sent)
        received = None
    else:
        received = messages.recv_forward("x")
    messages.close()
    return received


def specs(*tensors):
    return tuple(Spec(tuple(x.shape), x.dtype) for x in tensors)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.zeros(0, 4),
        torch.tensor(3.5),
        torch.arange(5),
        torch.arange(6.0).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.float64),
    ],
    ids=["transposed", "strided", "empty", "scalar", "int64", "bfloat16", "bool", "float64"],
)
def test_any_layout_and_dtype_arrives(pool, tensor):
    _, (received,) = pool.run(2, exchange, (tensor,), specs(tensor))
    assert received.dtype == tensor.dtype
    assert torch.equal(received, tensor)


@pytest.mark.parametrize(
    ("sent", "agreed", "words"),
    [
        (torch.zeros(4), torch.zeros(6), ["(4,)", "(6,)"]),
        (torch.zeros(6), torch.zeros(4), ["(4,)", "(6,)"]),
        (torch.zeros(2, 3), torch.zeros(3, 2), ["(2, 3)", "(3, 2)"]),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float16), ["bfloat16", "float16"]),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3), ["int32", "float32"]),
    ],
    ids=["shorter", "longer", "other shape", "bf16 as fp16", "int32 as fp32"],
)
def test_broken_contract_raises_on_both_ends(pool, sent, agreed, words):
    outcomes = pool.outcomes(2, exchange, (sent,), specs(agreed))
    for outcome in outcomes:
        assert "ContractError" in outcome.error
        assert all(word in outcome.error for word in words), outcome.error
