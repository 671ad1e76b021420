"""Step 6: every schedule ends with the monolith's bits, whatever the ranks, microbatches, optimizer and dtype."""

import itertools
import random

import pytest

from step6_schedules.schedules import SCHEDULES
from tests.monolith import small
from tests.sizes import admits
from tests.training import Job, assert_equals_monolith, train_jobs

# A schedule, and the chunks that each rank has under it.
VARIANTS = (
    ("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3), ("bfs", 2),
    ("bfs", 3), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2),
)  # fmt: skip
QUICK_AT_8 = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("gpipe", 1), ("zb-h2", 1))
AXES = {
    "num_ranks": (1, 2, 3, 4, 8),
    "variant": VARIANTS,
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
    """The training of one combination: 9 layers, or one for each stage where there are more stages.

    dualpipe-v needs at least 2P microbatches: there the axis says how many more it gets.
    """
    (schedule, num_chunks), num_ranks = chosen["variant"], chosen["num_ranks"]
    changes = {axis: chosen[axis] for axis in ("num_microbatches", "optimizer", "dtype")}
    if schedule == "dualpipe-v":
        changes["num_microbatches"] += 2 * num_ranks - 1
        changes["batch_size"] = changes["num_microbatches"] + 5
    config = small(**changes, num_layers=max(9, num_ranks * num_chunks))
    return Job(config, schedule, num_chunks=num_chunks)


def run_and_compare(pool, num_ranks, jobs, limit):
    results = pool.run(num_ranks, train_jobs, jobs, limit=limit)
    assert len(jobs) > 0
    for index, job in enumerate(jobs):
        assert_equals_monolith([ranks[index] for ranks in results], job)


@pytest.mark.parametrize("num_ranks", [pytest.param(p, marks=[pytest.mark.slow] * (p == 8)) for p in AXES["num_ranks"]])
def test_pairs_equal_the_monolith(pool, num_ranks):
    picked = [chosen for chosen in pairwise(AXES) if chosen["num_ranks"] == num_ranks]
    if num_ranks == 8:  # slow on two cores; `test_all_equal_the_monolith` has the others
        picked = [chosen for chosen in picked if chosen["variant"] in QUICK_AT_8][:5]
        assert len(picked) == 5
    run_and_compare(pool, num_ranks, [job_of(chosen) for chosen in picked], limit=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant[0]} V={variant[1]}")
@pytest.mark.parametrize("num_ranks", AXES["num_ranks"])
def test_all_equal_the_monolith(pool, num_ranks, variant):
    rest = {axis: values for axis, values in AXES.items() if axis not in ("num_ranks", "variant")}
    # For time, above all with eight ranks on two cores; the other numbers of microbatches are among the pairs.
    rest["num_microbatches"] = (3,) if num_ranks == 8 else (3, 8)
    jobs = [
        job_of({"num_ranks": num_ranks, "variant": variant, **dict(zip(rest, values, strict=True))})
        for values in itertools.product(*rest.values())
    ]
    assert len(jobs) == (6 if num_ranks == 8 else 12)
    run_and_compare(pool, num_ranks, jobs, limit=500)


SIZES = {3: [(1, 1, 7), (3, 3, 3), (7, 1, 1)], 6: [(1, 1, 1, 1, 1, 4), (2, 2, 2, 1, 1, 1)]}


def test_even_batches_and_layers_by_hand(pool):
    every = [(s, m) for s in SCHEDULES for m in (2, 8) if admits(s, 3, m)]
    jobs = [
        Job(
            small(batch_size=8, num_microbatches=m),
            schedule,
            SIZES[3 * SCHEDULES[schedule].default_chunks][index % 2],
        )
        for index, (schedule, m) in enumerate(every)
    ]
    run_and_compare(pool, 3, jobs, limit=100)
    assert {job.config.num_microbatches for job in jobs} == {2, 8}
    assert {job.schedule for job in jobs} == {*SCHEDULES}


def test_uneven_batches(pool):
    jobs = [
        Job(small(batch_size=rows, num_microbatches=m, dtype="float64"), s)
        for rows in (7, 8)
        for s in SCHEDULES
        for m in (3, 5)
        if admits(s, 2, m) and (m == 3 or not admits(s, 2, 3))
    ]
    run_and_compare(pool, 2, jobs, limit=100)
    assert {job.schedule for job in jobs} == {*SCHEDULES}


def test_the_pairs_really_cover_all_pairs():
    picked = pairwise(AXES)
    for a, b in itertools.combinations(AXES, 2):
        met = {(chosen[a], chosen[b]) for chosen in picked}
        assert met == set(itertools.product(AXES[a], AXES[b]))
    assert {chosen["num_ranks"] for chosen in picked} == set(AXES["num_ranks"])
