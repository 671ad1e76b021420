"""1F1B: as few forwards ahead as keep the pipeline full, then one forward and one backward in turn."""

from step5_orchestrator.table import Table
from step6_schedules.phases import one_stage_a_rank


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Table:
    """Makespan (M+P-1)(F+B), as GPipe's; only min(M, P-r) microbatches in flight on rank r.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.1.
    """
    # BEGIN SOLUTION step6.one_f_one_b
    return one_stage_a_rank("1f1b", num_ranks, num_microbatches, warmup=lambda rank: num_ranks - 1 - rank)
    # END SOLUTION
