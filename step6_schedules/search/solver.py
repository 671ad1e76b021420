"""Quick constructions, then beam searches, up to a bound or the effort."""

from collections.abc import Sequence
from typing import NamedTuple

from step6_schedules.search.beam import Beam
from step6_schedules.search.bound import lower_bound
from step6_schedules.search.greedy import greedy, settings
from step6_schedules.search.insert import insert
from step6_schedules.search.problem import Problem, Rows
from step6_schedules.search.timing import fits, times

LARGE = 50_000  # actions, from which on insertion is cut short


class Found(NamedTuple):
    """rows: a list a rank of (act, microbatch). bound: no table is shorter. effort: acts looked at."""

    rows: Rows
    makespan: float
    peaks: list[int]
    bound: float
    effort: int


class Solver:
    """Looks for the smallest makespan of one problem. effort counts acts looked at: no result depends on a clock."""

    def __init__(self, problem: Problem, budget: int, goal: float = 0) -> None:
        """budget: the most effort. goal: a makespan that is good enough; the lower bound always is."""
        self.p, self.budget, self.effort = problem, budget, 0
        self.bound = lower_bound(problem)
        self.goal = max(goal, self.bound)
        self.best, self.rows, self.peaks, self.start = float("inf"), None, None, None

    def offer(self, rows: Rows | None) -> bool:
        """Keeps these rows if they fit and are faster, or as fast with a smaller largest peak; whether faster."""
        if rows is None:
            return False
        makespan, start, peaks = times(self.p, rows)
        if not fits(peaks, self.p.caps) or (makespan, max(peaks)) >= (self.best, max(self.peaks or [0])):
            return False
        faster = makespan < self.best
        self.best, self.rows, self.peaks, self.start = makespan, rows, peaks, start
        return faster

    def is_done(self) -> bool:
        """Whether the goal is reached."""
        return self.best <= self.goal * (1 + 1e-12)

    def solve(self) -> None:
        """Constructs, then improves."""
        self.construct()
        self.improve()

    def construct(self) -> None:
        """List scheduling under many settings, then insertion; half the effort, or a few runs if that is more."""
        p, cost = self.p, self.p.num_acts * self.p.num_microbatches
        self.offer([[(x, m) for m in range(p.num_microbatches) for x in acts] for acts in p.on])  # always fits
        for tried, setting in enumerate(settings(p)):
            if self.is_done() or (tried >= 8 and self.effort + cost > self.budget // 3):
                break
            self.offer(greedy(p, *setting))
            self.effort += cost
        if not self.is_done():
            rows, effort = insert(p, max(self.budget // 6, 64 * cost if cost < LARGE else 16 * cost))
            self.offer(rows)
            self.effort += effort

    def improve(self) -> None:
        """Beams of growing width: ranked by bound (exact once nothing is cut off), then two guided by the best rows."""
        p, width = self.p, 2
        least = p.num_acts * p.num_acts * p.num_microbatches  # what one beam costs at least
        while not self.is_done() and self.effort + least < self.budget:
            faster = False
            for guided, patient in ((False, True), (True, False), (True, True)):
                if self.is_done():
                    break
                beam = Beam(p, self.budget - self.effort)
                rows, complete = beam.run(width, self.best - p.unit, self._guide() if guided else None, patient)
                self.effort += beam.effort
                if rows is None and complete and not guided:
                    self.bound = self.best
                    return
                faster = self.offer(rows) or faster
            width *= 1 if faster else 4

    def _guide(self) -> list[list[float]]:
        """Start times of the best rows, [act][microbatch]."""
        return [[self.start[x, m] for m in range(self.p.num_microbatches)] for x in range(self.p.num_acts)]


def solve(problem: Problem, candidates: Sequence[Rows] = (), budget: int | None = None) -> Found:
    """Rows with a makespan as small as the search finds, and among those a largest peak as small as it finds.

    candidates: rows to start from, which the result is never slower than where they fit. budget: the most acts looked
    at (default: by size). The smaller peak is looked for by bisection, with a fifth of the budget and what is left.
    """
    p = problem
    if budget is None:
        budget = min(3_000_000, max(800_000, 3000 * p.num_acts * p.num_microbatches))
    solver = Solver(p, budget * 4 // 5)
    for rows in candidates:
        solver.offer(rows)
    solver.solve()
    rows, peaks, effort = solver.rows, solver.peaks, solver.effort
    low, high = p.num_chunks, max(peaks)
    while low < high and effort < budget:
        middle = (low + high) // 2
        smaller = p.capped([min(middle, cap) for cap in p.caps or [middle] * p.num_ranks])
        attempt = Solver(smaller, (budget - effort) // 3, solver.best)
        if attempt.bound <= solver.best * (1 + 1e-12):
            attempt.solve()
        effort += attempt.effort
        if attempt.is_done():
            rows, peaks, high = attempt.rows, attempt.peaks, max(attempt.peaks)
        else:
            low = middle + 1
    return Found(rows, solver.best, peaks, solver.bound, effort)
