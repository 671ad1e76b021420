"""V-shaped zero bubble: the stages go down the ranks and up again, so the first rank also has the last stage."""

from step5_orchestrator.costs import UNIT_COST, Cost
from step5_orchestrator.table import Table
from step6_schedules.filling import fill_with_weights
from step6_schedules.phases import v_row


def zb_v(num_ranks: int, num_microbatches: int, cost: Cost = UNIT_COST) -> Table:
    """Rank r has stages r and 2P-1-r; makespan 6M+P-1 slots when all take one (M >= 2P-1), the longest span 6M.

    At most 2P chunk activations in flight on every rank, each of half as many layers: the memory of 1F1B's rank 0 with
    the bubble of zb_h2. The order of F and I is fixed; W fills what would be idle when actions cost `cost`, and makes
    room for the next F. Fewer microbatches than 2P-1 leave cells out. Source: Qi et al., arXiv 2401.10241, section 6.
    """
    rows = [
        v_row(
            rank,
            num_ranks,
            num_microbatches,
            (2 * (num_ranks - rank) - 1, "Fa"),
            (rank, "Fb Fa"),
            (num_ranks - rank, "Fb Ib"),
            (num_microbatches, "Fa Ia Fb Ib"),
        )
        for rank in range(num_ranks)
    ]
    return fill_with_weights("zb-v", rows, 2 * num_ranks, cost)
