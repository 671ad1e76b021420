"""Step 1: who gets which layers, and stages by hand that equal the monolith."""

import itertools
import random

import pytest
import torch
from torch import nn

from step0_monolith.data import batch, microbatch_sizes, microbatches
from step0_monolith.loss import batch_weight, loss_share
from step0_monolith.model import Draw, layers, run_layers
from step0_monolith.options import UsageError
from step0_monolith.reference import forward_backward
from step1_partition.__main__ import run_by_hand
from step1_partition.batch_norm import check_batch_norm
from step1_partition.partition import PartitionOptions, bounds, by_cost, by_hand, evenly, measure_costs, split
from step1_partition.stage import Stage
from tests.modules import Join, batch_normed, embedded, frozen_first, residual
from tests.monolith import assert_same_bits, monolith, named, small


def test_evenly_for_every_size():
    for num_stages in range(1, 11):
        for num_layers in range(num_stages, 41):
            sizes = evenly(num_layers, num_stages)
            handed_out = [layer for start, stop in bounds(sizes) for layer in range(start, stop)]
            assert handed_out == list(range(num_layers))
            assert len(sizes) == num_stages
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1


def test_ten_layers_over_three_stages():
    assert [(start, stop - 1) for start, stop in bounds(evenly(10, 3))] == [(0, 3), (4, 6), (7, 9)]


def test_more_stages_than_layers_names_both():
    with pytest.raises(UsageError, match=r"3 layers cannot fill 4 stages"):
        evenly(3, 4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("5,3,x", "whole numbers"),
        ("5,0,4", "each stage needs at least 1"),
        ("5,-1,5", "each stage needs at least 1"),
        ("", "whole numbers"),
    ],
)
def test_layers_per_stage_that_make_no_sense(value, message):
    with pytest.raises(UsageError, match=message):
        PartitionOptions(layers_per_stage=value)


@pytest.mark.parametrize("sizes", [[5, 4], [3, 3, 3, 0], [2, 3, 3], [4, 4, 2]])
def test_by_hand_says_what_sum_and_length_must_be(sizes):
    with pytest.raises(UsageError, match=r"must have 3, one a stage, each at least 1, with sum 9"):
        by_hand(sizes, 9, 3)
    assert by_hand([2, 3, 4], 9, 3) == [2, 3, 4]


def cheapest(costs, num_stages):
    """The smallest possible dearest stage, by trying every split."""
    ends = len(costs)
    splits = ([0, *cuts, ends] for cuts in itertools.combinations(range(1, ends), num_stages - 1))
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise(split)) for split in splits)


def test_by_cost_is_exact():
    draw = random.Random(0)
    for _ in range(300):
        num_layers = draw.randint(1, 9)
        num_stages = draw.randint(1, num_layers)
        costs = [draw.choice([0, 0, 1, 2, 5, 100]) for _ in range(num_layers)]
        sizes = by_cost(costs, num_stages)
        assert sum(sizes) == num_layers
        assert len(sizes) == num_stages
        assert min(sizes) >= 1
        assert max(sum(costs[a:b]) for a, b in bounds(sizes)) == cheapest(costs, num_stages)


@pytest.mark.parametrize("costs", [[1] * 5, [1000, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 7, 0, 0]])
def test_by_cost_leaves_no_stage_empty(costs):
    assert min(by_cost(costs, 4)) >= 1


@pytest.mark.parametrize(
    ("costs", "stages"), [([1.0], 2), ([1, -1], 1), ([float("nan"), 1], 2), ([1e308] * 3, 2), ([1, 2], 0)]
)
def test_by_cost_refuses(costs, stages):
    with pytest.raises(UsageError):
        by_cost(costs, stages)


def test_no_stage_may_be_empty_however_it_is_asked_for():
    for refuse in (
        lambda: evenly(3, 0),
        lambda: evenly(3, -1),
        lambda: by_hand([], 0, 0),
        lambda: split([nn.ReLU(), nn.ReLU()], [2, 0]),
        lambda: split([nn.ReLU(), nn.ReLU()], [5, -3]),
        lambda: PartitionOptions(layers_per_stage=[]),
        lambda: PartitionOptions(layers_per_stage=[2.7, 1]),
    ):
        with pytest.raises(UsageError):
            refuse()


def test_measured_costs_leave_no_trace():
    modules = [nn.Embedding(10, 8), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5)]
    costs = measure_costs(modules, torch.randint(10, (4,)))
    assert len(costs) == 4
    assert min(costs) > 0
    assert all(p.grad is None for m in modules for p in m.parameters())


def test_tied_parameters_across_stages_are_refused_with_both_names():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    with pytest.raises(UsageError, match=r"layer 0.weight \(stage 0\) and layer 2.weight \(stage 1\)"):
        split([a, nn.ReLU(), b], [1, 2])
    assert [len(part) for part in split([a, nn.ReLU(), b], [3])] == [3]


def test_one_module_in_two_stages_is_refused():
    norm = nn.BatchNorm1d(4)
    with pytest.raises(UsageError, match="are the same tensor"):
        split([norm, nn.Linear(4, 4), norm], [2, 1])


def stages_of(modules, sizes):
    return [Stage(part, start) for part, (start, _) in zip(split(modules, sizes), bounds(sizes), strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("sizes", [[9], [4, 5], [1, 1, 7], [1] * 9])
def test_stages_by_hand_equal_the_monolith(sizes, dtype):
    config = small(dtype=dtype)
    stages = stages_of(layers(config), sizes)
    inputs, targets = batch(config, 0)
    loss = run_by_hand(stages, inputs, targets, config.num_microbatches)
    assert loss.item() == monolith(config).losses[0]
    found = named((m for stage in stages for m in stage.modules), gradients=True)
    assert assert_same_bits(found, monolith(config).gradients) == 18
    assert [stage.in_flight for stage in stages] == [0] * len(sizes)


def run_both(modules, again, sizes, inputs, targets, num_microbatches=3):
    """Loss and gradients of stages by hand, and of the uncut modules `again`."""
    stages = stages_of(modules, sizes)
    weight = batch_weight(targets)
    pieces = zip(microbatches(inputs, num_microbatches), microbatches(targets, num_microbatches), strict=True)
    for m, (piece, piece_targets) in enumerate(pieces):
        values, draw = (piece,), Draw(0, 0, m)
        for stage in stages[:-1]:
            values = stage.forward(m, values, draw=draw)
        stages[-1].forward(m, values, loss=lambda x, t=piece_targets: loss_share(x, t, weight), draw=draw)
        gradients = None
        for stage in reversed(stages):
            gradients = stage.backward(m, gradients)
    forward_backward(again, inputs, targets, num_microbatches)
    return named(modules, gradients=True), named(again, gradients=True)


def built(make):
    torch.manual_seed(3)
    return make()


@pytest.mark.parametrize(
    ("make", "sizes"),
    [(embedded, [1, 1, 2, 2]), (embedded, [1] * 6), (residual, [1, 1, 1, 1, 1]), (residual, [2, 1, 2]),
     (frozen_first, [1, 1, 1, 1]), (batch_normed, [2, 2])],
    ids=["embedded", "embedded, one a stage", "residual over stages", "residual", "frozen first stage", "batch norm"],
)  # fmt: skip
def test_any_modules_equal_the_uncut_ones(make, sizes):
    torch.manual_seed(0)
    inputs = torch.randint(50, (7,)) if make is embedded else torch.randn(7, 8)
    found, expected = run_both(built(make), built(make), sizes, inputs, torch.randint(10, (7,)))
    assert_same_bits(found, expected)


def test_backward_without_forward_says_so():
    stage = Stage([nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match="backward of microbatch 3"):
        stage.backward(3, (torch.zeros(1, 2),))


def test_a_stage_lets_go_of_a_microbatch_after_its_backward():
    stage = Stage(layers(small(), 1, 3), 1)
    x = torch.randn(2, 16, requires_grad=True)
    for m in (0, 1):
        stage.forward(m, (x,))
    assert stage.in_flight == 2
    stage.backward(1, (torch.zeros(2, 16),))
    assert stage.in_flight == 1


def test_batch_norm_warns_and_refuses_one_row():
    modules = [nn.Linear(4, 4), nn.BatchNorm1d(4)]
    with pytest.warns(UserWarning, match="layer 6 uses batch normalisation: its mean and variance"):
        check_batch_norm(modules, [2, 2], first_layer=5)
    with pytest.raises(UsageError, match="one row alone; lower --num-microbatches"):
        check_batch_norm(modules, microbatch_sizes(5, 3))


def test_autocast_equals_the_monolith():
    config = small()
    inputs, targets = batch(config, 0)
    cut, whole = layers(config), layers(config)
    with torch.autocast("cpu", torch.bfloat16):
        loss = run_by_hand(stages_of(cut, [3, 6]), inputs, targets, 4)
        expected = forward_backward(whole, inputs, targets, 4)
    assert torch.equal(loss, expected)
    assert_same_bits(named(cut, gradients=True), named(whole, gradients=True))


def test_run_layers_takes_and_returns_tuples():
    x = torch.randn(3, 8)
    (joined,) = run_layers([Join()], (x, x))
    assert torch.equal(joined, 2 * x)
