"""Weight gradients as filling: W goes where its rank would wait otherwise."""

import heapq
from collections import deque
from collections.abc import Sequence

from step5_orchestrator.actions import Action, Value, is_given, makes, needs
from step5_orchestrator.collector import paused_collector
from step5_orchestrator.costs import UNIT_COST, Cost
from step5_orchestrator.prediction import travel_times
from step5_orchestrator.table import Table, make_table


@paused_collector()
def fill_with_weights(name: str, rows: Sequence[Sequence[Action]], cap: int, cost: Cost = UNIT_COST) -> Table:
    """The table of rows that have F and I only, with every W put in.

    The rows are run with the costs. Whenever a rank's next action has to wait, or is an F for which `cap` chunk
    activations leave no room, the rank runs its oldest W instead; those that are left come last. Rows that wait for
    each other give a table that ends there, which a check of legality refuses. Time: linear in the number of actions,
    but for the choice of the rank whose turn it is.
    """
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    num_stages = len(rank_of)
    duration = {(op, stage): cost.of(Action(stage, op, 0)) for op in "FIW" for stage in rank_of}
    travel = travel_times([rank_of[stage] for stage in range(num_stages)], cost)
    todo = [deque(row) for row in rows]
    later: list[deque[Action]] = [deque() for _ in rows]
    held = [0] * len(rows)
    filled: list[list[Action]] = [[] for _ in rows]
    there: dict[Value, float] = {}
    waiting: dict[Value, tuple[float, int]] = {}
    turns = [(0.0, rank) for rank in range(len(rows))]
    while turns:
        # The rank that is free first: all that the others start before now is decided.
        now, rank = turns[0]
        if not todo[rank]:
            filled[rank].extend(later[rank])
            heapq.heappop(turns)
            continue
        action = todo[rank][0]
        start, missing = now, None
        for value in needs(action):
            if value in there:
                start = max(start, there[value])
            elif not is_given(value, num_stages):
                missing = value
                break
        stage, op, m = action
        if later[rank] and (missing or start > now or (op == "F" and held[rank] >= cap)):
            # It would wait, and has a W to do meanwhile.
            action = later[rank].popleft()
            stage, op, m = action
            held[rank] -= 1
        elif missing:
            # Nothing to do: it sleeps until another rank makes the value.
            heapq.heappop(turns)
            waiting[missing] = (now, rank)
            continue
        elif start > now:
            # The value is on its way: the rank has its turn again when it is there.
            heapq.heapreplace(turns, (start, rank))
            continue
        else:
            todo[rank].popleft()
            if op == "F":
                held[rank] += 1
            else:
                later[rank].append(Action(stage, "W", m))
        end = now + duration[op, stage]
        filled[rank].append(action)
        heapq.heapreplace(turns, (end, rank))
        for value in makes(action):
            there[value] = end + (travel[value.place] if value.kind in ("activation", "gradient") else 0.0)
            if value in waiting:
                since, sleeper = waiting.pop(value)
                heapq.heappush(turns, (max(since, there[value]), sleeper))
    return make_table(name, filled)
