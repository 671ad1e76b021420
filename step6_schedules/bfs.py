"""Breadth first: each rank takes all microbatches through one chunk before it starts the next."""

from step5_orchestrator.table import Table
from step6_schedules.phases import loop_table


def bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Table:
    """Makespan max(MV+P-1, PV+M-1)(F+B), as interleaving's; MV chunk activations in flight on every rank.

    GPipe over V chunks: forwards of chunk 0, 1, ..., then backwards, last chunk first. What it buys for its memory: a
    chunk's microbatches follow each other, so its weights are fetched, or its gradients sent to other replicas, once.
    Microbatches ascend in the backwards too. Source: Lamy-Poirier, arXiv 2211.05953.
    """
    order = [(chunk, m) for chunk in range(num_chunks) for m in range(num_microbatches)]
    return loop_table("bfs", num_ranks, num_chunks, order, warmup=lambda rank: len(order))
