"""Step 4: a rank builds its own stage and nothing else."""

import pytest
import torch
from torch import nn

from step0_monolith.data import batch, microbatches
from step0_monolith.model import layers, run_layers
from step0_monolith.options import UsageError
from step1_partition.stage import Stage
from step2_comms.contract import Spec
from step4_sharded.boundaries import output_specs
from step4_sharded.forward import sharded_forward
from step4_sharded.shard import shard, size_of
from tests.monolith import assert_same_bits, joined, named, small


def forward(world, config, layers_per_stage=None):
    """The sharded forward, and this rank's parameters by name."""
    stage = shard(config, world.size, world.rank, layers_per_stage)
    pieces = microbatches(batch(config, 0)[0], config.num_microbatches) if world.rank == 0 else None
    return sharded_forward(world, stage, pieces), named(stage.modules, stage.first_layer), size_of(stage)[1]


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_sharded_forward_and_weights_equal_the_monolith(pool, num_ranks):
    config = small(dtype="bfloat16" if num_ranks % 2 else "float32")
    results = pool.run(num_ranks, forward, config)
    whole = layers(config)
    assert assert_same_bits(joined([parameters for _, parameters, _ in results]), named(whole)) == 18
    expected = {}
    with torch.no_grad():
        for m, piece in enumerate(microbatches(batch(config, 0)[0], config.num_microbatches)):
            (expected[str(m)],) = run_layers(whole, (piece,))
    assert_same_bits({str(m): output for m, output in enumerate(results[-1][0])}, expected)
    assert [outputs for outputs, _, _ in results[:-1]] == [[]] * (num_ranks - 1)
    sizes = [size for _, _, size in results]
    all_bytes = sum(p.nbytes for layer in whole for p in layer.parameters())
    assert sum(sizes) == all_bytes
    assert num_ranks == 1 or max(sizes) < all_bytes


def test_layers_per_stage(pool):
    config = small()
    results = pool.run(3, forward, config, [1, 6, 2])
    assert [len(parameters) // 2 for _, parameters, _ in results] == [1, 6, 2]
    assert_same_bits(joined([parameters for _, parameters, _ in results]), named(layers(config)))


def test_more_ranks_than_layers_is_refused():
    with pytest.raises(UsageError, match="3 layers cannot fill 4 stages"):
        shard(small(num_layers=3), 4, 0)


def test_output_specs_come_from_the_layers_and_change_nothing():
    norm, dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)
    stage = Stage([nn.ReLU(inplace=True), nn.Linear(4, 8), norm, dropout])
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    state = torch.get_rng_state()
    (spec,) = output_specs(stage, (Spec((5, 4), torch.float32, True),))
    assert spec == Spec((5, 8), torch.float32, True)
    assert all(torch.equal(value, norm.state_dict()[name]) for name, value in before.items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in stage.parameters())
    assert stage.in_flight == 0
    with torch.autocast("cpu", torch.bfloat16):
        (spec,) = output_specs(Stage([nn.Linear(4, 8)]), (Spec((5, 4), torch.float32),))
    assert spec.dtype == torch.bfloat16
    frozen = nn.Linear(4, 8).requires_grad_(False)
    assert not output_specs(Stage([frozen]), (Spec((5, 4), torch.float32),))[0].requires_grad
    assert output_specs(Stage([nn.Embedding(9, 3)]), (Spec((5,), torch.int64),))[0] == Spec((5, 3), torch.float32, True)
