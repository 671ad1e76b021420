"""Steps 0 and 5: clipping by the norm of all gradients, and the step size's schedule, with the monolith's bits."""

import itertools
import math

import pytest
import torch
from torch import nn

from step0_monolith.config import Config
from step0_monolith.options import UsageError
from step0_monolith.train import train
from step0_monolith.update import clip, learning_rate, norm_of, squared_norms
from step1_partition.stage import Stage
from step5_orchestrator.global_norm import GlobalNorm
from tests.monolith import assert_same_bits, joined, monolith, small
from tests.training import Job, train_jobs


def with_gradients(*values):
    parameters = [nn.Parameter(torch.zeros(len(v))) for v in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


def test_the_norm_and_the_factor_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator).tolist() for n in (3, 50, 1)]
    ours, theirs = with_gradients(*values), with_gradients(*values)
    norm = norm_of(squared_norms(ours))
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(theirs, 1.5).item(), rel=1e-6)
    clip(ours, norm, 1.5)
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-6) for a, b in zip(ours, theirs, strict=True))
    before = [p.grad.clone() for p in ours]
    clip(ours, norm_of(squared_norms(ours)), 100.0)
    assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True))


def test_no_gradient_counts_as_zero():
    parameters = [*with_gradients([3.0, 4.0]), nn.Parameter(torch.ones(2))]
    assert norm_of(squared_norms(parameters)) == 5.0
    assert norm_of(squared_norms([])) == 0.0
    clip(parameters, 5.0, 1.0)
    assert parameters[1].grad is None


class Holder(nn.Module):
    def __init__(self, value):
        super().__init__()
        (self.weight,) = with_gradients(value)


def two_norms(world):
    """Rank 0's gradients have norm 3, rank 1's have norm 4; a third rank has a stage without parameters."""
    modules = [Holder([3.0, 0.0]), Holder([4.0]), nn.ReLU()]
    stage = Stage([modules[world.rank]], world.rank)
    norm = GlobalNorm(world, {world.rank: stage}, world.size)()
    clip(stage.parameters(), norm, 1.0)
    return norm, [p.grad for p in stage.parameters()]


def test_norms_3_and_4_make_5_on_every_rank_and_scale_alike(pool):
    ranks = pool.run(3, two_norms)
    assert [norm for norm, _ in ranks] == [5.0, 5.0, 5.0]
    assert torch.allclose(ranks[0][1][0], torch.tensor([0.6, 0.0]), rtol=1e-6)
    assert torch.allclose(ranks[1][1][0], torch.tensor([0.8]), rtol=1e-6)
    assert ranks[2][1] == []


def test_warmup_and_cosine():
    config = Config(lr_schedule="warmup-cosine", warmup_iterations=4, num_iterations=12, learning_rate=0.8)
    rates = [learning_rate(config, i) for i in range(12)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4] == 0.8
    assert rates[8] == pytest.approx(0.4)
    assert rates[11] == pytest.approx(0.4 * (1 + math.cos(math.pi * 7 / 8)))
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    assert {learning_rate(Config(), i) for i in range(300)} == {0.1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"warmup_iterations": 3}, "--warmup-iterations 3 needs --lr-schedule warmup-cosine"),
        ({"lr_schedule": "warmup-cosine", "warmup_iterations": 301}, "is more than the 300 of the run"),
        ({"lr_schedule": "linear"}, "choose one of: constant, warmup-cosine"),
        ({"max_grad_norm": 0}, "--max-grad-norm must be a finite number above 0"),
        ({"max_grad_norm": "nan"}, "--max-grad-norm must be a finite number above 0"),
    ],
)
def test_refused(values, message):
    with pytest.raises(UsageError, match=message):
        Config(**values)


CHANGES = [
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 0.5, "optimizer": "adam", "dtype": "float64"},
    {"max_grad_norm": 2.0, "dtype": "bfloat16"},
    {"lr_schedule": "warmup-cosine", "warmup_iterations": 2, "max_grad_norm": 1.0},
    {"lr_schedule": "warmup-cosine", "optimizer": "adam"},
]


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_clipped_and_scheduled_training_equals_the_monolith(pool, num_ranks):
    schedules = ["1f1b", "gpipe", "naive"]
    jobs = [Job(small(**change), schedules[i % 3]) for i, change in enumerate(CHANGES)]
    results = pool.run(num_ranks, train_jobs, jobs)
    for index, job in enumerate(jobs):
        ranks = [rank[index] for rank in results]
        assert all(rank.losses == monolith(job.config).losses for rank in ranks)
        assert_same_bits(joined([rank.parameters for rank in ranks]), monolith(job.config).parameters)


def test_clipping_and_the_schedule_change_the_training():
    losses = {tuple(train(small(**change)).losses) for change in [{}, *CHANGES]}
    assert len(losses) == 1 + len(CHANGES)
