"""Clocks brought nearer by the run's own messages: none arrives before it leaves."""

from collections.abc import Mapping, Sequence

ROUNDING = 1e-9  # seconds


def narrowed(errors: Sequence[float], leads: Mapping[tuple[int, int], float]) -> tuple[list[float], list[float], float]:
    """Corrections to add to the times of each rank, how far off these still are at most, and the widening (see below).

    errors: seconds that a rank's times may be off, as its clock's comparison found them; 0 for rank 0. leads: for a
    pair (source, destination) the smallest of end of receive - start of send, over all its messages, in times aligned
    so far. A true clock has none below 0, and many are small, so that they say more than the comparison did. Every
    correction lies within the rank's error, and no lead is below 0 afterwards. Where that cannot be (the clocks did not
    drift evenly), all errors are widened by as little as it takes, which is the third value.

    The conditions are differences of two unknowns, each with an upper bound. The shortest paths from and to a node that
    stands for rank 0's clock are the largest and the smallest corrections that meet them all (R. Bellman, On a routing
    problem, 1958); halfway between the two lies one that does as well, since the conditions are linear.
    """
    widening, step = 0.0, 1e-6
    while (found := _bounds([error + widening if r else 0.0 for r, error in enumerate(errors)], leads)) is None:
        widening, step = widening + step, 2 * step
    low, high = found
    middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    return middle, [(b - a) / 2 for a, b in zip(low, high, strict=True)], widening


def _bounds(errors: Sequence[float], leads: Mapping[tuple[int, int], float]) -> tuple[list[float], list[float]] | None:
    """The smallest and the largest corrections; None when none meets all conditions."""
    # correction[source] - correction[destination] <= lead
    high = _shortest(errors, [(destination, source, lead) for (source, destination), lead in leads.items()])
    low = _shortest(errors, [(source, destination, lead) for (source, destination), lead in leads.items()])
    if high is None or low is None:
        return None
    return [-distance for distance in low], high


def _shortest(errors: Sequence[float], edges: Sequence[tuple[int, int, float]]) -> list[float] | None:
    """Distances from a node that reaches each rank in its error, and which each reaches in its error."""
    distance = list(errors)
    for _ in range(len(errors) + 1):
        changed = False
        for start, end, length in edges:
            if distance[start] + length < distance[end] - ROUNDING:
                distance[end], changed = distance[start] + length, True
        if any(found < -error - ROUNDING for found, error in zip(distance, errors, strict=True)):
            return None  # a circle of conditions that no correction meets
        if not changed:
            return distance
    return None
