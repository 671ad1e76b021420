"""GPipe: all forwards, then all backwards."""

from step5_orchestrator.table import Table
from step6_schedules.phases import one_stage_a_rank


def gpipe(num_ranks: int, num_microbatches: int) -> Table:
    """Makespan (M+P-1)(F+B); M microbatches in flight on every rank.

    Backwards go in ascending order, as the monolith adds them. Source: Huang et al., arXiv 1811.06965, section 2.3.
    """
    # BEGIN SOLUTION step6.gpipe
    return one_stage_a_rank("gpipe", num_ranks, num_microbatches, warmup=lambda rank: num_microbatches)
    # END SOLUTION
