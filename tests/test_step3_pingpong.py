"""Step 3: the two halves on two ranks equal the uncut model, and every value that travels is checked."""

from unittest import mock

import pytest
import torch

from step0_monolith.config import Config
from step0_monolith.data import batch
from step0_monolith.model import layers
from step0_monolith.options import RunError
from step1_partition.partition import bounds, evenly
from step1_partition.stage import Stage
from step2_comms.contract import Spec
from step2_comms.p2p import Messages, edges_of_a_line
from step3_pingpong.pingpong import agree, compare, ping_pong, uncut
from step3_pingpong.round_trip import check_equal, round_trip, samples


class Corrupting(Messages):
    """On one rank, what is received differs from what was sent in the last bit of one value."""

    def __init__(self, world, edges, bad_rank):
        super().__init__(world, edges)
        self.bad_rank = bad_rank

    def _spoiled(self, tensors):
        if self.world.rank == self.bad_rank:
            raw = tensors[0].detach().flatten()[:1].view(torch.uint8)
            raw[0] ^= 1
        return tensors

    def recv_forward(self, label, **kwargs):
        return self._spoiled(super().recv_forward(label, **kwargs))

    def recv_backward(self, label, **kwargs):
        return self._spoiled(super().recv_backward(label, **kwargs))


def play(world, config, bad_rank=None):
    """One ping-pong; returns the comparison with the uncut model on this rank."""
    messages = Corrupting(world, edges_of_a_line(2), bad_rank)
    ranges = bounds(evenly(config.num_layers, 2))
    (start, stop), cut = ranges[world.rank], ranges[0][1]
    rows, targets = batch(config, 0)
    stage = Stage(layers(config, start, stop), start)
    agree(messages, Spec((config.batch_size, config.shape_of_layer(cut)[0]), config.torch_dtype))
    mine = (rows, None) if world.rank == 0 else (None, targets)
    received = ping_pong(messages, stage, *mine)
    found = compare(received, stage, uncut(layers(config), cut, rows, targets))
    messages.close()
    return found


SMALL = {"num_microbatches": 1, "data": "random"}


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(num_layers=2, width=3, batch_size=5, dtype="float64", **SMALL),
        Config(num_layers=5, width=33, batch_size=7, dtype="bfloat16", **SMALL),
        Config(num_layers=3, width=1, batch_size=1, seed=9, **SMALL),
    ],
    ids=["default", "2 layers float64", "5 layers bfloat16", "one row, width 1"],
)
def test_equals_the_uncut_model_bit_for_bit(pool, config):
    zero, one = pool.run(2, play, config)
    assert not set(zero) & set(one)
    everything = {**zero, **one}
    # activation, its gradient, the loss, and each layer's weight and bias: all compared, none twice
    assert len(everything) == 3 + 2 * config.num_layers
    assert [name for name, same in everything.items() if not same] == []


@pytest.mark.parametrize(("bad_rank", "name"), [(1, "activation"), (0, "gradient")])
def test_one_wrong_bit_in_a_message_is_seen_by_the_comparison(pool, bad_rank, name):
    config = Config(num_layers=4, width=8, batch_size=4, dtype="float64", **SMALL)
    found = pool.run(2, play, config, bad_rank)[bad_rank]
    assert found[f"the {name} that rank {bad_rank} received"] is False
    assert not all(same for key, same in found.items() if "parameter" in key), "it must reach the gradients too"


def travel(world, tensors, bad_rank=None):
    messages = Corrupting(world, edges_of_a_line(2), bad_rank)
    count = round_trip(messages, tensors)
    messages.close()
    return count


def test_round_trip_of_every_kind_of_tensor(pool):
    assert pool.run(2, travel, samples()) == [sum(tensor.numel() for tensor in samples())] * 2


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_wrong_bit_on_the_way_is_noticed_where_it_arrives(pool, bad_rank):
    outcomes = pool.outcomes(2, travel, (torch.arange(12.0) + 1,), bad_rank)
    assert f"on rank {bad_rank}: 1 of 12 values differ, the first at position 0" in outcomes[bad_rank].error


def read_as_float16(world):
    """A way that reads bfloat16 as float16 on rank 1 and sends the same bits back."""
    messages = Messages(world, edges_of_a_line(2))
    plain = messages.recv_forward
    with mock.patch.object(messages, "recv_forward", lambda label: tuple(x.view(torch.float16) for x in plain(label))):
        plain_back = messages.send_backward
        with mock.patch.object(
            messages, "send_backward", lambda label, sent: plain_back(label, [x.view(torch.bfloat16) for x in sent])
        ):
            return round_trip(messages, (torch.arange(3).to(torch.bfloat16),))


def test_an_error_that_the_way_back_undoes_is_noticed(pool):
    outcomes = pool.outcomes(2, read_as_float16)
    assert "received (3,) torch.float16" in outcomes[1].error


def test_check_equal_compares_bits():
    values = torch.tensor([0.0, float("nan"), float("inf")])
    check_equal("x", values, values.clone())
    with pytest.raises(RunError, match=r"1 of 3 values differ, the first at position 0: sent 0.0, received -0.0"):
        check_equal("x", values, torch.tensor([-0.0, float("nan"), float("inf")]))
    with pytest.raises(RunError, match="float16"):
        check_equal("x", values.bfloat16(), values.bfloat16().view(torch.float16))
    with pytest.raises(RunError, match=r"sent \(3,\) .* received \(3, 1\)"):
        check_equal("x", values, values[:, None])
    check_equal("x", torch.empty(0, 4), torch.empty(0, 4))
