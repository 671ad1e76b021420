"""The sizes at which tests look at every schedule."""

from step0_monolith.options import UsageError
from step6_schedules.schedules import SCHEDULES

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8)]


def admits(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether the schedule has a table of that size."""
    try:
        SCHEDULES[schedule](num_ranks, num_microbatches)
    except UsageError:
        return False
    return True


def every_size(sizes=SIZES) -> list[tuple[str, int, int]]:
    """(schedule, ranks, microbatches) of every schedule at every size; dualpipe-v with 2P - 1 microbatches more."""
    return [(s, p, m + 2 * p - 1 if s == "dualpipe-v" else m) for s in SCHEDULES for p, m in sizes]
