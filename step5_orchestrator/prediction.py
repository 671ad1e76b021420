"""What a table predicts: its makespan, its bubble, and how many microbatches each rank holds."""

from step5_orchestrator.table import UNIT_COST, Cost, Table, timing


def makespan(table: Table, cost: Cost = UNIT_COST) -> float:
    """Time from the first start to the last end, in the unit of the costs."""
    times = timing(table, cost).values()
    return max(end for _, end in times) - min(start for start, _ in times)


def bubble(table: Table, cost: Cost = UNIT_COST) -> float:
    """Idle share of ranks x makespan, 0..1."""
    busy = sum(cost[action.op] for row in table.rows for action in row)
    return 1 - busy / (table.num_ranks * makespan(table, cost))


def peak_in_flight(table: Table) -> list[int]:
    """For each rank the most chunk activations that it holds at once: one more at F, one less at B."""
    peaks = []
    for row in table.rows:
        held = peak = 0
        for action in row:
            held += 1 if action.op == "F" else -1
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
