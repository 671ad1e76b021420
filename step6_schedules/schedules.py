"""All schedules by name."""

from collections.abc import Callable
from dataclasses import dataclass

from step5_orchestrator.collector import paused_collector
from step5_orchestrator.costs import UNIT_COST, Cost
from step5_orchestrator.naive import naive
from step5_orchestrator.table import Table
from step6_schedules.bfs import bfs
from step6_schedules.dual_pipe_v import dualpipe_v
from step6_schedules.gpipe import gpipe
from step6_schedules.interleaved import interleaved
from step6_schedules.one_f_one_b import one_f_one_b
from step6_schedules.v_shaped import zb_v
from step6_schedules.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True)
class Schedule:
    """A published schedule: the function that writes its table, and what it can have.

    only_chunks: the chunks a rank that it is defined for, None for any number. by_cost: whether its order depends on
    what the actions cost.
    """

    name: str
    write: Callable[..., Table]
    only_chunks: int | None = 1
    default_chunks: int = 1
    placement: str = "loop"
    splits: bool = False
    by_cost: bool = False

    def __call__(self, num_ranks: int, num_microbatches: int) -> Table:
        """The table with the default chunks and costs."""
        return self.table(num_ranks, num_microbatches)

    def table(
        self, num_ranks: int, num_microbatches: int, num_chunks: int | None = None, cost: Cost = UNIT_COST
    ) -> Table:
        """The table; num_chunks counts only where there is a choice. Raises TableError for a size that it cannot do."""
        keywords = {}
        if self.only_chunks is None:
            keywords["num_chunks"] = num_chunks or self.default_chunks
        if self.by_cost:
            keywords["cost"] = cost
        with paused_collector():
            return self.write(num_ranks, num_microbatches, **keywords)


_ALL = [
    Schedule("naive", naive),
    Schedule("gpipe", gpipe),
    Schedule("1f1b", one_f_one_b),
    Schedule("interleaved", interleaved, only_chunks=None, default_chunks=2),
    Schedule("bfs", bfs, only_chunks=None, default_chunks=2),
    Schedule("zb-h1", zb_h1, splits=True),
    Schedule("zb-h2", zb_h2, splits=True),
    Schedule("zb-v", zb_v, only_chunks=2, default_chunks=2, placement="v", splits=True, by_cost=True),
    Schedule("dualpipe-v", dualpipe_v, only_chunks=2, default_chunks=2, placement="v", splits=True),
]
SCHEDULES = {schedule.name: schedule for schedule in _ALL}
