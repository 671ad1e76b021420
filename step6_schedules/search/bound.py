"""Lower bounds on the makespan: what no table can beat."""

from step6_schedules.search.problem import Problem


def work_bound(p: Problem) -> float:
    """Some rank's work between the earliest start and the shortest finish: head + M runs of a stretch of acts + tail.

    A stretch is a contiguous part of the chain's acts on one rank; with a split backward the W of its I's may be
    counted too, and then the last of them has no tail. With all acts counted this is the full load of a rank; with one
    stage's F and B it is the critical path plus M - 1 of that stage.
    """
    best = 0
    for acts in p.on:
        chain = [x for x in acts if x < 2 * p.S]
        for i, first in enumerate(chain):
            work = later = 0
            for x in chain[i:]:
                work += p.time[x] * p.num_microbatches
                if p.split and x >= p.S:
                    later += p.time[x + p.S] * p.num_microbatches
                best = max(best, p.head[first] + work + max(p.tail[x], later))
    return best


def memory_bound(p: Problem) -> float:
    """What the caps alone force (0 without caps).

    Each activation of stage s lives at least from its F to the end of its release. A rank packs M lives of every stage
    into k <= cap slots, one after another in a slot; the k-th slot opens k - 1 forwards after the first and closes as
    many releases before the end.
    """
    if p.caps is None:
        return 0
    best, S = 0, p.S
    for r, acts in enumerate(p.on):
        stages = [x for x in acts if x < S]
        free = [x + p.release * S for x in stages]
        lives = [p.head[w] + p.time[w] - p.head[x] for x, w in zip(stages, free, strict=True)]
        step = min(p.time[x] for x in stages) + min(p.time[w] for w in free)
        slots = range(1, min(p.caps[r], p.num_microbatches * len(stages)) + 1)
        packed = min(sum(lives) * p.num_microbatches / k + step * (k - 1) / 2 for k in slots)
        ends = p.head[stages[0]] + min(p.tail[w] for w in free)
        best = max(best, ends + packed)
        if p.num_chunks == 1:
            best = max(best, _rounds(p, stages[0], lives[0], p.caps[r]))
    return best


def _rounds(p: Problem, s: int, life: float, cap: int) -> float:
    """One chunk: F of microbatch k * cap waits for the release of (k - 1) * cap, a whole round trip earlier."""
    rounds = -(-p.num_microbatches // cap) - 1
    left = p.num_microbatches - rounds * cap
    stages = range(s, p.S)  # the last round: its microbatches pass every stage from here on
    last = max(p.head[q] - p.head[s] + left * (p.time[q] + p.time[q + p.S]) + p.tail[q + p.S] for q in stages)
    return p.head[s] + rounds * life + last


def lower_bound(p: Problem) -> float:
    """The best of the cheap bounds, rounded up to a multiple of the unit when all times are whole."""
    bound = max(work_bound(p), memory_bound(p))
    if p.unit >= 1:
        return -int(-bound // p.unit) * p.unit
    return bound
