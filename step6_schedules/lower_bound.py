"""How short a table can be at best: what no order of the same actions can beat."""

from collections.abc import Sequence
from dataclasses import replace

from step5_orchestrator.costs import Cost
from step5_orchestrator.table import Table
from step6_schedules.search.bound import lower_bound as bound_of
from step6_schedules.search.problem import Problem


def lower_bound(table: Table, cost: Cost, caps: Sequence[int] | None = None) -> float:
    """A makespan that no table with the same stages on the same ranks, microbatches and costs can go below."""
    if "B" in table.ops and "W" in table.ops and cost.B < cost.I + cost.W:
        # Such a table may take the shorter of the two everywhere.
        share = cost.B / (cost.I + cost.W)
        cost = replace(cost, I=cost.I * share, W=cost.W * share)
    return bound(table.rank_of_stage, table.num_microbatches, cost, splits="W" in table.ops, caps=caps)


def bound(
    rank_of_stage: Sequence[int],
    num_microbatches: int,
    cost: Cost,
    *,
    splits: bool,
    caps: Sequence[int] | None = None,
) -> float:
    """The largest of some times that any table needs, in the unit of the costs.

    A rank, or a stage, cannot start before the first microbatch has come to it; then it has all its work to do; and
    after its last backward for the input the gradient still has the way back to stage 0 before it. Where the backward
    is split, W may follow at the end. caps, the most chunk activations that each rank may hold, make the bound larger:
    only so many microbatches are under way at a time. A table that mixes B with I and W counts as split.

    For equal stages and free messages this is, whole: (F+B) max(MV+P-1, PV+M-1); split, at least the largest of
    MV(F+I+W)+(P-1)F, (MV+P-1)(F+I)+W, (PV+M-1)(F+I)+W and (PV-1)F+M(F+I+W).
    """
    return bound_of(Problem(rank_of_stage, num_microbatches, cost, splits, caps))
