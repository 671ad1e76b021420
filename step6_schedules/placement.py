"""Which stages a rank holds: in a loop, or there and back again in a V."""

from step5_orchestrator.table import Table

PLACEMENTS = ("loop", "v")


def rank_of_stage(placement: str, num_ranks: int, stage: int) -> int:
    """loop: stage s on rank s mod P. v: down the ranks and up again, so that rank r holds stages r and 2P-1-r."""
    chunk, place = divmod(stage, num_ranks)
    return place if placement == "loop" or chunk % 2 == 0 else num_ranks - 1 - place


def placement_of(table: Table) -> tuple[str, int | None]:
    """A table's placement, loop, v or "other", and its chunks a rank, None where ranks differ.

    With one chunk a rank, and on one rank alone, loop and v are the same; such a table counts as loop.
    """
    owners, num_ranks = table.rank_of_stage, table.num_ranks
    counts = {owners.count(rank) for rank in range(num_ranks)}
    chunks = counts.pop() if len(counts) == 1 else None
    for placement in PLACEMENTS if chunks is not None else ():
        if list(owners) == [rank_of_stage(placement, num_ranks, stage) for stage in range(len(owners))]:
            return placement, chunks
    return "other", chunks
