"""Step 6: every schedule ends with the monolith's bits, whatever the ranks, microbatches, optimizer and dtype."""

import itertools
import random

import pytest

from step6_schedules.schedules import SCHEDULES
from tests.monolith import small
from tests.training import Job, assert_equals_monolith, train_jobs

AXES = {
    "num_ranks": (1, 2, 3, 4, 8),
    "schedule": tuple(SCHEDULES),
    "num_microbatches": (1, 2, 3, 5, 8),
    "optimizer": ("sgd", "adam"),
    "dtype": ("float32", "float64", "bfloat16"),
}


def pairwise(axes):
    """A few combinations in which every two values of two different axes meet at least once."""
    names = list(axes)
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]
    random.Random(0).shuffle(every)

    def pairs(chosen):
        return {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}

    open_pairs = set().union(*(pairs(chosen) for chosen in every))
    picked = []
    while open_pairs:
        best = max(every, key=lambda chosen: len(pairs(chosen) & open_pairs))
        picked.append(best)
        open_pairs -= pairs(best)
    return picked


def job_of(chosen):
    config = small(**{axis: chosen[axis] for axis in ("num_microbatches", "optimizer", "dtype")})
    return Job(config, chosen["schedule"])


def run_and_compare(pool, num_ranks, jobs, limit):
    results = pool.run(num_ranks, train_jobs, jobs, limit=limit)
    assert len(jobs) > 0
    for index, job in enumerate(jobs):
        assert_equals_monolith([ranks[index] for ranks in results], job)


@pytest.mark.parametrize("num_ranks", AXES["num_ranks"])
def test_pairs_equal_the_monolith(pool, num_ranks):
    picked = [chosen for chosen in pairwise(AXES) if chosen["num_ranks"] == num_ranks]
    run_and_compare(pool, num_ranks, [job_of(chosen) for chosen in picked], limit=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", AXES["num_ranks"])
def test_all_equal_the_monolith(pool, num_ranks, schedule):
    rest = {axis: values for axis, values in AXES.items() if axis not in ("num_ranks", "schedule")}
    jobs = [
        job_of({"schedule": schedule, **dict(zip(rest, values, strict=True))})
        for values in itertools.product(*rest.values())
    ]
    assert len(jobs) == 30
    run_and_compare(pool, num_ranks, jobs, limit=500)


def test_even_batches_and_layers_by_hand(pool):
    config = small(batch_size=8)
    jobs = [
        Job(small(batch_size=8, num_microbatches=m), schedule, sizes)
        for (schedule, m), sizes in zip(
            itertools.product(SCHEDULES, (1, 2, 4, 8)), itertools.cycle([(1, 1, 7), (3, 3, 3), (7, 1, 1)]), strict=False
        )
    ]
    run_and_compare(pool, 3, jobs, limit=100)
    # One loss, whatever the number of microbatches and the schedule.
    first = [job.config.num_microbatches for job in jobs]
    assert set(first) == {1, 2, 4, 8}
    assert config.batch_size == 8


def test_uneven_batches(pool):
    jobs = [Job(small(batch_size=rows, num_microbatches=3, dtype="float64"), s) for rows in (7, 8) for s in SCHEDULES]
    run_and_compare(pool, 2, jobs, limit=100)


def test_the_pairs_really_cover_all_pairs():
    picked = pairwise(AXES)
    for a, b in itertools.combinations(AXES, 2):
        met = {(chosen[a], chosen[b]) for chosen in picked}
        assert met == set(itertools.product(AXES[a], AXES[b]))
    assert {chosen["num_ranks"] for chosen in picked} == set(AXES["num_ranks"])
