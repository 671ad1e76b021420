"""Interleaving: each rank has several thinner stages, and the pipeline fills in a V-th of the time."""

from itertools import pairwise

from step5_orchestrator.table import Table
from step6_schedules.phases import loop_table


def groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """The microbatches in max(1, ⌊M/P⌋) groups of equal size, the first ones larger by one where need be.

    The largest has G = ⌈M / max(1, ⌊M/P⌋)⌉. Groups of G and a last one with what is left would not do: one with fewer
    than P microbatches can deadlock (P=5, V=3, M=31, which G=6 divides into 6 6 6 6 6 1).
    """
    count = max(1, num_microbatches // num_ranks)
    ends = [number * (num_microbatches // count) + min(number, num_microbatches % count) for number in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def interleaved_order(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) of a rank's forwards: group by group, in a group chunk by chunk.

    A group has P microbatches or a few more, so that when a rank is done with a chunk, the group's first microbatch
    has been round all ranks and is back for the next chunk.
    """
    # BEGIN SOLUTION step6.interleaved_order
    return [
        (chunk, m)
        for group in groups(num_ranks, num_microbatches)
        for chunk in range(num_chunks)
        for m in group
    ]  # fmt: skip
    # END SOLUTION


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Table:
    """Makespan max(MV+P-1, PV+M-1)(F+B), F and B of one chunk, any M, P and V.

    Rank r runs 2(P-1-r) + (V-1)G forwards ahead, G the largest group, and holds one chunk activation more, MV at most.
    Source: Narayanan et al., arXiv 2104.04473, section 2.2.2; there M is a multiple of P, and all groups have P.
    """
    order = interleaved_order(num_ranks, num_microbatches, num_chunks)
    ahead = (num_chunks - 1) * len(groups(num_ranks, num_microbatches)[0])
    return loop_table("interleaved", num_ranks, num_chunks, order, lambda rank: 2 * (num_ranks - 1 - rank) + ahead)
