"""A table with a time for each of its actions, predicted or measured: what every picture shows."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from step5_orchestrator.actions import Action, Value, is_given, makes, needs, taker
from step5_orchestrator.collector import paused_collector
from step5_orchestrator.costs import Cost
from step5_orchestrator.executor import Event
from step5_orchestrator.prediction import Timing, peak_in_flight, span
from step5_orchestrator.table import Table
from step6_schedules.simulate import Simulation, held_over_time


@dataclass(frozen=True)
class Timed:
    """What ran when. Times are in `unit`, and the first action starts at 0.

    caps: for each rank the most chunk activations that it was allowed to hold, None where nobody set a limit. cost:
    what the prediction was made with; None: the times were measured. note: for a title, how they were measured, or
    where the costs are from.
    """

    table: Table
    times: Timing
    unit: str
    cost: Cost | None = None
    caps: tuple[int, ...] | None = None
    note: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether these are times of a run."""
        return self.cost is None

    @cached_property
    def rows(self) -> list[list[Event]]:
        """For each rank its actions as they follow each other."""
        return [[Event(action, *self.times[action]) for action in row] for row in self.table.rows]

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return span(self.times)

    @cached_property
    def bubble(self) -> float:
        """Idle share of ranks x makespan, 0..1: whatever is not inside an action."""
        busy = sum(end - start for start, end in self.times.values())
        return 1 - busy / (self.table.num_ranks * self.makespan)

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """For each rank the most chunk activations that it holds at once."""
        return peak_in_flight(self.table)

    @cached_property
    def held(self) -> list[list[tuple[float, float]]]:
        """For each rank (time, chunk activations that it holds from then on)."""
        return held_over_time(self.table, self.times)

    @cached_property
    def makers(self) -> dict[Value, Action]:
        """The action that makes each value."""
        return {value: action for action in self.times for value in makes(action)}

    @cached_property
    def takers(self) -> dict[Value, Action]:
        """The action that needs each value."""
        return {value: action for action in self.times for value in needs(action)}

    def sources(self, action: Action) -> list[Action]:
        """The actions whose values this one needs; none for what is given."""
        return [self.makers[v] for v in needs(action) if not is_given(v, self.table.num_stages)]

    def waiters(self, action: Action) -> list[Action]:
        """The actions that need what this one makes."""
        last = self.table.num_stages
        return [self.takers[v] for v in makes(action) if 0 <= taker(v) < last]

    @cached_property
    def critical_path(self) -> list[Action]:
        """Actions from the first start to the last end of which each waited for the one before, because of its rank or
        of what that one makes.
        """
        if self.cost is not None:
            return Simulation(self.table, self.cost).critical_path()
        before = {b: a for row in self.table.rows for a, b in itertools.pairwise(row)}
        path = [max(self.times, key=lambda action: self.times[action][1])]
        while True:
            candidates = self.sources(path[-1]) + ([before[path[-1]]] if path[-1] in before else [])
            if not candidates:
                return path[::-1]
            path.append(max(candidates, key=lambda action: self.times[action][1]))


@paused_collector()
def predicted(
    table: Table, cost: Cost, unit: str = "slots", caps: Sequence[int] | None = None, note: str = ""
) -> Timed:
    """The table's own timing, where each action starts as soon as it can; costs are in `unit`."""
    return Timed(table, Simulation(table, cost).times, unit, cost, None if caps is None else tuple(caps), note)


@paused_collector()
def measured(
    table: Table, events: Sequence[Sequence[Event]], note: str = "", caps: Sequence[int] | None = None
) -> Timed:
    """One iteration as it ran, in milliseconds. events: for each rank, in seconds of clocks that agree."""
    start = min(row[0].start for row in events)
    times = {e.action: ((e.start - start) * 1e3, (e.end - start) * 1e3) for row in events for e in row}
    return Timed(table, times, "ms", None, None if caps is None else tuple(caps), note)
