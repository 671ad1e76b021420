"""What a table predicts: its times, its makespan, its bubble, and how many microbatches each rank holds."""

from collections.abc import Sequence

from step5_orchestrator.actions import Action, Value, ends_flight, is_given, makes, needs
from step5_orchestrator.collector import paused_collector
from step5_orchestrator.costs import UNIT_COST, Cost
from step5_orchestrator.table import Table

Timing = dict[Action, tuple[float, float]]


def travel_times(rank_of_stage: Sequence[int], cost: Cost) -> list[float]:
    """What a value takes over each boundary: nothing on one rank. Boundary b lies between stages b-1 and b."""
    travel = [0.0] * (len(rank_of_stage) + 1)
    for boundary in range(1, len(rank_of_stage)):
        if rank_of_stage[boundary - 1] != rank_of_stage[boundary]:
            travel[boundary] = cost.message(boundary)
    return travel


@paused_collector()
def timing(table: Table, cost: Cost = UNIT_COST) -> Timing:
    """Start and end of every action when each starts as soon as its rank is free and what it needs is there.

    Actions come in the table's order. Raises TableError when the table cannot run; linear in the number of actions.
    """
    rank_of, num_stages = table.rank_of_stage, table.num_stages
    ready: dict[Value, float] = {}
    free_at = [0.0] * table.num_ranks
    times: Timing = {}
    duration = {op: [cost.of(Action(stage, op, 0)) for stage in range(num_stages)] for op in table.ops}
    travel = travel_times(rank_of, cost)
    for action in table.order:
        stage, op, _ = action
        rank = rank_of[stage]
        start = free_at[rank]
        for value in needs(action):
            if not is_given(value, num_stages):
                start = max(start, ready.pop(value))
        end = start + duration[op][stage]
        times[action] = (start, end)
        free = end
        for value in makes(action):
            there = end
            if value.kind in ("activation", "gradient"):
                there += travel[value.place]
                if not cost.overlaps:
                    free = there
            ready[value] = there
        free_at[rank] = free
    return times


def makespan(table: Table, cost: Cost = UNIT_COST) -> float:
    """Time from the first start to the last end, in the unit of the costs."""
    return span(timing(table, cost))


def span(times: Timing) -> float:
    """Time from the first start to the last end of a timing."""
    return max(end for _, end in times.values()) - min(start for start, _ in times.values())


def bubble(table: Table, cost: Cost = UNIT_COST) -> float:
    """Idle share of ranks x makespan, 0..1."""
    return idle_share(table, cost, makespan(table, cost))


def idle_share(table: Table, cost: Cost, length: float) -> float:
    """The bubble of a table whose makespan is known."""
    busy = sum(cost.of(action) for row in table.rows for action in row)
    return 1 - busy / (table.num_ranks * length)


def peak_in_flight(table: Table) -> list[int]:
    """For each rank the most chunk activations that it holds at once: +1 at F, -1 at B, or at W where B is split."""
    peaks = []
    for row in table.rows:
        held = peak = 0
        for action in row:
            held += (action.op == "F") - ends_flight(action)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
