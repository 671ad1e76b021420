"""How short a table can be at best: what no order of the same actions can beat."""

import math
from collections.abc import Sequence

from step5_orchestrator.actions import Action
from step5_orchestrator.costs import Cost
from step5_orchestrator.table import Table


def lower_bound(table: Table, cost: Cost, caps: Sequence[int] | None = None) -> float:
    """A makespan that no table with the same stages on the same ranks, microbatches and costs can go below."""
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
    is split, W may follow at the end, and the last thing of all is a W. caps: the most chunk activations that each rank
    may hold; they count where each rank has one stage, B is whole, and all stages and messages cost the same (nothing).

    For equal stages and free messages this is, whole: (F+B) max(MV+P-1, PV+M-1); split: the largest of
    MV(F+I+W)+(P-1)F, (MV+P-1)(F+I)+W, (PV+M-1)(F+I)+W and (PV-1)F+M(F+I+W).
    """
    num_stages, num_ranks = len(rank_of_stage), max(rank_of_stage) + 1
    back = "I" if splits else "B"

    def total(op: str, stages: Sequence[int]) -> float:
        return sum(cost.of(Action(stage, op, 0)) for stage in stages)

    # To the start of stage s from stage 0, and from its backward back to the end of stage 0's.
    head, tail = [0.0], [0.0]
    for stage in range(1, num_stages):
        travels = cost.message(stage) if rank_of_stage[stage] != rank_of_stage[stage - 1] else 0.0
        head.append(head[-1] + total("F", [stage - 1]) + travels)
        tail.append(tail[-1] + total(back, [stage - 1]) + travels)
    last_w = total("W", [0]) if splits else 0.0
    holders = [[s for s in range(num_stages) if rank_of_stage[s] == rank] for rank in range(num_ranks)]
    bounds = [0.0]
    for stages in [*holders, *([s] for s in range(num_stages))]:
        first, way_back = min(head[s] for s in stages), min(tail[s] for s in stages)
        work = num_microbatches * (total("F", stages) + total(back, stages))
        bounds.append(first + work + way_back + (last_w if way_back or not splits else 0.0))
        if splits:
            bounds.append(first + work + num_microbatches * total("W", stages))
    everything = range(num_stages)
    bounds.append(head[-1] + total("F", [num_stages - 1]) + total(back, [num_stages - 1]) + tail[-1] + last_w)
    if caps is not None and not splits and num_stages == num_ranks and _is_even(rank_of_stage, cost):
        both = (total("F", everything) + total("B", everything)) / num_stages
        waits = max(
            (math.ceil(num_microbatches / cap) - 1) * max(0, num_ranks - rank - cap) for rank, cap in enumerate(caps)
        )
        bounds.append(both * (num_microbatches + num_ranks - 1 + waits))
    return max(bounds)


def _is_even(rank_of_stage: Sequence[int], cost: Cost) -> bool:
    in_line = list(rank_of_stage) == list(range(len(rank_of_stage)))
    even = cost.stage_factors is None or len(set(cost.stage_factors)) == 1
    return in_line and even and not any(cost.message(boundary) for boundary in range(1, len(rank_of_stage)))
