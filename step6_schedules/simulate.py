"""A table run on paper: its times, what its length hangs on, and what each rank holds from moment to moment."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from step5_orchestrator.actions import Action, ends_flight, is_given, makes, needs, taker
from step5_orchestrator.collector import paused_collector
from step5_orchestrator.costs import UNIT_COST, Cost
from step5_orchestrator.prediction import Timing, idle_share, peak_in_flight, span, timing
from step5_orchestrator.table import Table


@dataclass(frozen=True)
class Simulation:
    """A table with costs, and what follows from them, in the unit of the costs."""

    table: Table
    cost: Cost = UNIT_COST

    @cached_property
    def times(self) -> Timing:
        """Start and end of every action."""
        return timing(self.table, self.cost)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return span(self.times)

    @cached_property
    def bubble(self) -> float:
        """Idle share of ranks x makespan, 0..1."""
        return idle_share(self.table, self.cost, self.makespan)

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """For each rank the most chunk activations that it holds at once."""
        return peak_in_flight(self.table)

    @cached_property
    def max_span(self) -> float:
        """The longest time of one rank from its first start to its last end.

        The zero-bubble papers measure by it: their bubble is (max_span - work) / max_span (arXiv 2401.10241, 4).
        """
        return max(self.times[row[-1]][1] - self.times[row[0]][0] for row in self.table.rows)

    @paused_collector()
    def critical_path(self) -> list[Action]:
        """Actions from the first start to the last end of which none could be later: shorten one, and perhaps all ends
        sooner. Each waits for the one before it: for its rank, or for what it makes.
        """
        times = self.times
        maker = {value: action for action in times for value in makes(action)}
        before = {b: a for row in self.table.rows for a, b in itertools.pairwise(row)}
        path = [max(times, key=lambda action: times[action][1])]
        while True:
            here = path[-1]
            sources = [maker[v] for v in needs(here) if not is_given(v, self.table.num_stages)]
            candidates = [*sources, *([before[here]] if here in before else [])]
            if not candidates:
                return path[::-1]
            # What arrived last is what it waited for.
            path.append(max(candidates, key=lambda source: self._arrival(source, here)))

    def _arrival(self, source: Action, at: Action) -> float:
        """When what `source` makes for `at`, or its rank, is there."""
        end, owners = self.times[source][1], self.table.rank_of_stage
        if owners[source.stage] != owners[at.stage]:
            return end + self.cost.message(max(source.stage, at.stage))
        if self.cost.overlaps:
            return end
        takers = [(taker(value), value.place) for value in makes(source)]
        sent = [place for stage, place in takers if 0 <= stage < len(owners) and owners[stage] != owners[at.stage]]
        return end + sum(self.cost.message(place) for place in sent)

    @paused_collector()
    def memory(self, bytes_of_stage: Sequence[float] | None = None) -> list[list[tuple[float, float]]]:
        """For each rank (time, what it holds from then on): chunk activations, or bytes.

        bytes_of_stage: what one microbatch's activations of each stage take. An activation counts from the start of its
        F to the end of its B, or of its W where the backward is split.
        """
        return held_over_time(self.table, self.times, bytes_of_stage)

    def peak_bytes(self, bytes_of_stage: Sequence[float]) -> list[float]:
        """For each rank the most bytes of activations that it holds at once."""
        return [max(held for _, held in curve) for curve in self.memory(bytes_of_stage)]


def held_over_time(
    table: Table, times: Timing, bytes_of_stage: Sequence[float] | None = None
) -> list[list[tuple[float, float]]]:
    """For each rank (time, what it holds from then on), as `Simulation.memory`, of times from anywhere."""
    curves = []
    for row in table.rows:
        changes: dict[float, float] = {}
        for action in row:
            size = 1 if bytes_of_stage is None else bytes_of_stage[action.stage]
            start, end = times[action]
            if action.op == "F":
                changes[start] = changes.get(start, 0) + size
            elif ends_flight(action):
                changes[end] = changes.get(end, 0) - size
        held, curve = 0.0, []
        for moment in sorted(changes):
            held += changes[moment]
            curve.append((moment, held))
        curves.append(curve)
    return curves
