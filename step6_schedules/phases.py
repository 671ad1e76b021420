"""The one loop behind naive, GPipe and 1F1B: warmup, steady, cooldown."""

from collections.abc import Callable, Sequence

from step5_orchestrator.actions import Action
from step5_orchestrator.table import Table, make_table


def phases(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def one_stage_a_rank(name: str, num_ranks: int, num_microbatches: int, warmup: Callable[[int], int]) -> Table:
    """The table whose rank r runs stage r, with `warmup(r)` forwards ahead of its first backward."""
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", m) for m in range(num_microbatches)]
        backwards = [Action(rank, "B", m) for m in range(num_microbatches)]
        rows.append(phases(forwards, backwards, warmup(rank)))
    return make_table(name, rows)
