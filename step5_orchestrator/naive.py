"""Naive stop-and-wait, the first table: one microbatch goes all the way and back before the next one starts."""

from step5_orchestrator.actions import Action
from step5_orchestrator.table import Table, make_table


def naive(num_ranks: int, num_microbatches: int) -> Table:
    """Every rank runs F0 B0 F1 B1 ...; makespan M·P·(F+B), one microbatch in flight."""
    # BEGIN SOLUTION step5.naive
    rows = [
        [Action(rank, op, m) for m in range(num_microbatches) for op in ("F", "B")] for rank in range(num_ranks)
    ]  # fmt: skip
    return make_table("naive", rows)
    # END SOLUTION


def forward_only(table: Table) -> Table:
    """The table of an evaluation: the forwards of `table`'s stages on the same ranks, in ascending order."""
    rows = [
        [Action(stage, "F", m) for m in range(table.num_microbatches) for stage in table.stages_of(rank)]
        for rank in range(table.num_ranks)
    ]
    return make_table("evaluation", rows)
