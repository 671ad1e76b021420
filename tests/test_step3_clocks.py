"""Step 3: the clocks of ranks, compared by messages there and back."""

import time

import pytest

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
    """Each rank's clock runs faster than rank 0's. Returns how far off a moment between two comparisons is, and the
    error that the clock states.
    """
    before = time.perf_counter()
    with skewed(3.0 * world.rank, 1 + 0.01 * world.rank):
        first = compare_clocks(world)
        time.sleep(0.2)
        shown = time.perf_counter()
        true = before + (shown - before - 3.0 * world.rank) / (1 + 0.01 * world.rank)
        time.sleep(0.1)
        clock = Clock(first, compare_clocks(world))
    return clock.aligned(shown) - true, clock.error


def test_a_drift_between_two_comparisons_is_taken_out(pool):
    for off, error in pool.run(3, drifting):
        # `before` was read a moment before the clock was set wrong; a drift of 1 % of that moment is all it can do.
        assert abs(off) <= error + 1e-4


def test_a_time_between_two_readings():
    clock = Clock(Reading(100.0, 10.0, 0.25), Reading(200.0, 20.0, 0.5))
    assert [clock.aligned(t) for t in (100.0, 150.0, 200.0, 300.0)] == [90.0, 135.0, 180.0, 270.0]
    assert clock.error == 0.5
    one = Clock(Reading(100.0, 10.0, 0.25), Reading(100.0, 10.0, 0.25))
    assert one.aligned(150.0) == 140.0
