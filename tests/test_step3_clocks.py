"""Step 3: the clocks of ranks, compared by messages there and back."""

import time

import pytest

from step3_pingpong import clocks
from step3_pingpong.clocks import Clock, Reading, compare_clocks
from tests.skewed import skewed


def compared(world, seconds: float):
    """This rank's clock is `seconds` times its rank ahead."""
    with skewed(seconds * world.rank):
        return compare_clocks(world)


@pytest.mark.parametrize("seconds", [5.0, -5.0, 0.01])
def test_a_difference_is_found_within_the_error(pool, seconds):
    readings = pool.run(3, compared, seconds)
    assert readings[0].offset == readings[0].error == 0.0
    for rank, reading in enumerate(readings):
        assert abs(reading.offset - seconds * rank) <= reading.error
        assert reading.error < 4  # half of a round trip, whatever else the machine does
    assert all(reading.error > 0 for reading in readings[1:])


def test_ranks_of_one_host_read_one_clock(pool):
    assert [(reading.offset, reading.error) for reading in pool.run(3, compared, 0.0)] == [(0.0, 0.0)] * 3


def drifting(world):
    """Each rank's clock runs faster than rank 0's, which is right. A moment between two comparisons as aligned, between
    what the right clock showed before and after it was read; and the error that is stated.
    """
    with skewed(3.0 * world.rank, 1 + 0.01 * world.rank) as real:
        first = compare_clocks(world)
        time.sleep(0.2)
        before, shown, after = real(), time.perf_counter(), real()
        time.sleep(0.1)
        clock = Clock(first, compare_clocks(world))
    return before, clock.aligned(shown), after, clock.error


def test_a_drift_between_two_comparisons_is_taken_out(pool):
    for before, aligned, after, error in pool.run(3, drifting):
        assert before - error <= aligned <= after + error


def one_leaves(world):
    """Rank 2 is gone when its turn comes."""
    if world.rank == 2:
        clocks._answer = lambda world, host: (_ for _ in ()).throw(ValueError("planted"))
    compare_clocks(world)


def test_a_rank_that_is_lost_meanwhile_is_named(pool):
    found = pool.outcomes(3, one_leaves)
    assert found[2].error == "ValueError: planted"
    assert "rank 2 failed: ValueError: planted" in found[0].error
    assert "comparing clocks with rank 2" in found[0].error


def test_a_time_between_two_readings():
    clock = Clock(Reading(100.0, 10.0, 0.25), Reading(200.0, 20.0, 0.5))
    assert [clock.aligned(t) for t in (100.0, 150.0, 200.0, 300.0)] == [90.0, 135.0, 180.0, 270.0]
    assert clock.error == 0.5
    one = Clock(Reading(100.0, 10.0, 0.25), Reading(100.0, 10.0, 0.25))
    assert one.aligned(150.0) == 140.0
