"""Step 3: two ranks that both send first end within the timeout and say who waits for whom; the cures finish."""

from unittest import mock

import pytest
import torch

from step3_pingpong import deadlock
from step3_pingpong.deadlock import exchange
from tests.ranks import torchrun

TIMEOUT = 3
MILLIONS = pytest.param(20_000_000, marks=pytest.mark.slow)


def rank_of(world):
    return world.rank


@pytest.mark.parametrize("num_floats", [10, MILLIONS])
def test_both_send_first_ends_in_time_and_names_the_circle(pool, num_floats):
    pool.run(2, rank_of)  # the limit below is for ranks that have started, which may take longer than the deadlock
    outcomes = pool.outcomes(2, exchange, num_floats, "none", timeout=TIMEOUT, limit=TIMEOUT + 10)
    circle = (
        f"deadlock: rank 0 waits in send to 1 ({num_floats:,} floats), "
        f"rank 1 waits in send to 0 ({num_floats:,} floats)"
    )
    for outcome in outcomes:
        assert circle in outcome.error


@pytest.mark.parametrize("num_floats", [10, MILLIONS])
@pytest.mark.parametrize("cure", ["order", "isend"])
def test_the_cures_finish(pool, cure, num_floats):
    pool.run(2, exchange, num_floats, cure)


def exchange_wrong(world, cure):
    plain = deadlock._receive

    def wrong(world, like):
        received = plain(world, like)
        if world.rank == 1:
            received[7] = torch.nextafter(received[7], torch.tensor(100.0))
        return received

    with mock.patch.object(deadlock, "_receive", wrong):
        exchange(world, 10, cure)


@pytest.mark.parametrize("cure", ["order", "isend"])
def test_a_wrong_value_is_noticed(pool, cure):
    outcomes = pool.outcomes(2, exchange_wrong, cure)
    assert "message to rank 1: 1 of 10 values differ, the first at position 7" in outcomes[1].error
    assert not outcomes[0].error


@pytest.mark.slow
@pytest.mark.parametrize("num_floats", [10, 20_000_000])
def test_the_program_ends_with_the_circle(num_floats):
    ran = torchrun(2, "step3_pingpong.deadlock", "--timeout", 5, "--num-floats", num_floats)
    assert ran.status == 1
    assert f"deadlock: rank 0 waits in send to 1 ({num_floats:,} floats), rank 1 waits in send to 0" in ran.stderr
    ours = [line for line in ran.stderr.splitlines() if "step3_pingpong/" in line]
    assert ours == [], "no traceback of ours"
    assert ran.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("cure", ["order", "isend"])
def test_the_program_with_a_cure(cure):
    ran = torchrun(2, "step3_pingpong.deadlock", "--cure", cure)
    assert ran.status == 0
    assert ran.stdout == f"cure {cure}: both ranks have all 10 floats of the other\n"
