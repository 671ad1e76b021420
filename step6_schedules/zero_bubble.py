"""Zero bubble: the neighbour waits for I alone, so W can fill what 1F1B leaves idle."""

from step5_orchestrator.table import Table
from step6_schedules.phases import one_stage_a_rank


def zb_h1(num_ranks: int, num_microbatches: int) -> Table:
    """1F1B's order with each B in two; rank r puts W off by r more I, and holds min(M, P) as 1F1B's rank 0 does.

    Makespan, for M >= P and W <= F, I, the larger of M(F+I+W) + (P-1)(F+I-W) and (M+P-1)(F+I) + W; for any M when all
    take the same. Source: Qi et al., arXiv 2401.10241, section 2.1 (where B is our I).
    """
    # BEGIN SOLUTION step6.zb_h1
    return one_stage_a_rank(
        "zb-h1", num_ranks, num_microbatches, warmup=lambda rank: num_ranks - 1 - rank, lag=lambda rank: rank
    )
    # END SOLUTION


def zb_h2(num_ranks: int, num_microbatches: int) -> Table:
    """Twice as many forwards ahead: from its first action to its last a rank never waits.

    Makespan, for M >= P and W <= F, I, the larger of M(F+I+W) + (P-1)F and (M+P-1)(F+I) + W. The longest span of one
    rank is M(F+I+W) + (P-1)(F+I-2W) for M >= 2P-1: no bubble at all when the three are equal and the next iteration
    starts without waiting for all ranks. At most min(M, 2P-1) microbatches in flight. Rank r puts W off by 2r more I.
    With fewer microbatches than 2P-1 some I would wait behind a W that comes too late: the lag shrinks in proportion,
    to zb_h1's r at M = P. Source: Qi et al., arXiv 2401.10241, section 2.2.
    """
    beyond = min(max(num_microbatches - num_ranks, 0), num_ranks - 1)

    def lag(rank: int) -> int:
        return rank + rank * beyond // max(1, num_ranks - 1)

    return one_stage_a_rank("zb-h2", num_ranks, num_microbatches, lambda rank: 2 * (num_ranks - 1 - rank), lag)
