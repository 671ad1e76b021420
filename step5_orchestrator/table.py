"""A schedule's table: a row of actions a rank; its timing, its legality, and its messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from step0_monolith.options import UsageError
from step5_orchestrator.actions import Action, Value, is_given, makes, needs

Cost = Mapping[str, float]
UNIT_COST: Cost = {"F": 1.0, "B": 2.0}
Timing = dict[Action, tuple[float, float]]


class TableError(UsageError):
    """A table that cannot be run; the message names rank, action and reason."""


@dataclass(frozen=True)
class Table:
    """One row of actions for each rank, in the order in which the rank runs them."""

    name: str
    rows: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Rows."""
        return len(self.rows)

    @cached_property
    def num_stages(self) -> int:
        """Stages, numbered from 0 to the largest that is named."""
        return 1 + max((action.stage for row in self.rows for action in row), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches, numbered from 0 to the largest that is named."""
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that runs each stage. Raises TableError for a stage that no rank or more than one runs."""
        rank_of: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                if rank_of.setdefault(action.stage, rank) != rank:
                    raise TableError(
                        f"{self.name}: rank {rank} has {action}, but stage {action.stage} is on rank "
                        f"{rank_of[action.stage]}"
                    )
        missing = [stage for stage in range(self.num_stages) if stage not in rank_of]
        if missing:
            raise TableError(f"{self.name}: no rank has stage {missing[0]} of 0..{self.num_stages - 1}")
        return tuple(rank_of[stage] for stage in range(self.num_stages))

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, ascending."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: " + " ".join(map(str, row)) for r, row in enumerate(self.rows))


def make_table(name: str, rows: Sequence[Sequence[Action]]) -> Table:
    """A table from lists of actions."""
    return Table(name, tuple(map(tuple, rows)))


def timing(table: Table, cost: Cost = UNIT_COST) -> Timing:
    """Start and end of every action when each starts as soon as it can and messages are free.

    Actions come in an order in which each follows all that it needs. Raises TableError when the rows wait for each
    other, or for a value that nothing makes; linear in the number of actions.
    """
    made: dict[Value, float] = {}
    times: Timing = {}
    position = [0] * table.num_ranks
    free_at = [0.0] * table.num_ranks
    waiting: dict[Value, int] = {}
    runnable = list(range(table.num_ranks))[::-1]
    while runnable:
        rank = runnable.pop()
        row = table.rows[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            wanted = [v for v in needs(action) if not is_given(v, table.num_stages)]
            missing = next((v for v in wanted if v not in made), None)
            if missing is not None:
                waiting[missing] = rank
                break
            start = max([free_at[rank], *(made[v] for v in wanted)])
            free_at[rank] = start + cost[action.op]
            times[action] = (start, free_at[rank])
            position[rank] += 1
            for value in makes(action):
                made[value] = free_at[rank]
                if value in waiting:
                    runnable.append(waiting.pop(value))
    if waiting:
        raise TableError(f"{table.name}: {_why_stuck(table, position)}")
    return times


def _why_stuck(table: Table, position: Sequence[int]) -> str:
    """Follows the waits from the first stuck rank until they close a circle or end at a value that nothing makes."""
    maker = {value: rank for rank, row in enumerate(table.rows) for action in row for value in makes(action)}
    done = {v for rank, row in enumerate(table.rows) for action in row[: position[rank]] for v in makes(action)}
    rank = next(r for r, row in enumerate(table.rows) if position[r] < len(row))
    seen, parts = [], []
    while rank not in seen:
        seen.append(rank)
        action = table.rows[rank][position[rank]]
        missing = next(v for v in needs(action) if not is_given(v, table.num_stages) and v not in done)
        if missing not in maker:
            parts.append(f"rank {rank} cannot run {action}: it needs {missing}, which no action makes")
            return ", ".join(parts)
        parts.append(f"rank {rank} cannot run {action}: it needs {missing}, which rank {maker[missing]} makes later")
        rank = maker[missing]
    return ", ".join(parts)


def check(table: Table, ops: Sequence[str] = ("F", "B")) -> None:
    """Raises TableError unless every stage runs every op on every microbatch exactly once, in a possible order."""
    if not table.rows:
        raise TableError(f"{table.name}: a table has at least one rank")
    expected = {
        Action(stage, op, m) for stage in range(table.num_stages) for op in ops for m in range(table.num_microbatches)
    }
    seen: set[Action] = set()
    for rank, row in enumerate(table.rows):
        for action in row:
            if action in seen:
                raise TableError(f"{table.name}: rank {rank} has {action} a second time")
            if action not in expected:
                raise TableError(
                    f"{table.name}: rank {rank} has {action}, which is no stage and microbatch from 0 on with an op of "
                    f"{', '.join(ops)}"
                )
            seen.add(action)
    missing = sorted(expected - seen)
    if missing:
        rank = table.rank_of_stage[missing[0].stage]
        raise TableError(f"{table.name}: rank {rank} lacks {', '.join(map(str, missing[:5]))}")
    if len(table.rank_of_stage) != table.num_stages or not all(table.rows):
        raise TableError(f"{table.name}: each of the {table.num_ranks} ranks needs at least one action")
    timing(table)
