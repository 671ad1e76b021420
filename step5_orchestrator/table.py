"""A schedule's table: a row of actions a rank, and one order of all its actions in which each finds what it needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from step0_monolith.options import UsageError
from step5_orchestrator.actions import Action, Value, is_given, makes, needs

PAIR = "OVERLAP_F_B"


class TableError(UsageError):
    """A table that cannot be run; the message, one line, names rank, action and reason.

    places: (rank, index in its row) of the actions that it is about; cycle: actions of which each waits for the next,
    and the last for the first; table: the one that was refused, once `legality.check` has looked at it.
    """

    table: "Table | None" = None

    def __init__(self, message: str, places: Sequence[tuple[int, int]] = (), cycle: Sequence[Action] = ()) -> None:
        super().__init__(message)
        self.places, self.cycle = tuple(places), tuple(cycle)


@dataclass(frozen=True)
class Table:
    """One row of actions for each rank, in the order in which the rank runs them.

    pairs: the forwards that share a cell with the backward right after them. Such a cell is an offer to a runtime that
    can mix the two; here they run one after the other.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    pairs: frozenset[Action] = field(default=frozenset())

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
    def ops(self) -> tuple[str, ...]:
        """The ops that occur, in the order F, B, I, W."""
        found = {action.op for row in self.rows for action in row}
        return tuple(op for op in "FBIW" if op in found)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that runs each stage. Raises TableError for a stage that no rank or more than one runs."""
        rank_of: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                if rank_of.setdefault(action.stage, rank) != rank:
                    raise _on_two_ranks(self, action.stage)
        missing = next((stage for stage in range(self.num_stages) if stage not in rank_of), None)
        if missing is not None:
            last = self.num_stages - 1
            places = [(rank_of[last], i) for i, action in enumerate(self.rows[rank_of[last]]) if action.stage == last]
            action = self.rows[rank_of[last]][places[0][1]]
            raise TableError(
                f"{self.name}: rank {rank_of[last]} has {action}, but no rank has stage {missing} of 0..{last}", places
            )
        return tuple(rank_of[stage] for stage in range(self.num_stages))

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, ascending."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]

    @cached_property
    def order(self) -> tuple[Action, ...]:
        """All actions, each after all that it needs and after those before it in its row.

        Raises TableError when rows wait for each other, or for a value that nothing makes. Linear in the number of
        actions.
        """
        made: set[Value] = set()
        done: list[Action] = []
        position = [0] * self.num_ranks
        waiting: dict[Value, int] = {}
        runnable = list(range(self.num_ranks))[::-1]
        num_stages = self.num_stages
        while runnable:
            rank = runnable.pop()
            row = self.rows[rank]
            place, end = position[rank], len(row)
            while place < end:
                action = row[place]
                for value in needs(action):
                    if value not in made and not is_given(value, num_stages):
                        waiting[value] = rank
                        break
                else:
                    done.append(action)
                    place += 1
                    for value in makes(action):
                        made.add(value)
                        if value in waiting:
                            runnable.append(waiting.pop(value))
                    continue
                break
            position[rank] = place
        if waiting:
            raise _stuck(self, position, made)
        return tuple(done)

    @cached_property
    def unordered_stages(self) -> tuple[int, ...]:
        """The stages that add their weight gradients in another order than microbatch 0, 1, 2, ...

        Floating-point sums depend on their order, so only the other stages are sure to end with the monolith's bits.
        """
        latest: dict[int, int] = {}
        found = set()
        for row in self.rows:
            for stage, op, m in row:
                if op in ("B", "W"):
                    if m < latest.get(stage, -1):
                        found.add(stage)
                    latest[stage] = m
        return tuple(sorted(found))

    def cells(self, rank: int) -> list[str]:
        """A rank's row as text, a paired cell as one."""
        texts: list[str] = []
        row = iter(self.rows[rank])
        for action in row:
            second = next(row, None) if action in self.pairs else None
            texts.append(str(action) if second is None else f"({action};{second}){PAIR}")
        return texts

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: " + " ".join(self.cells(r)) for r in range(self.num_ranks))


def make_table(name: str, rows: Sequence[Sequence[Action]], pairs: Iterable[Action] = ()) -> Table:
    """A table from lists of actions. pairs: forwards that share a cell with the action right after them."""
    return Table(name, tuple(map(tuple, rows)), frozenset(pairs))


def _on_two_ranks(table: Table, stage: int) -> TableError:
    """Names the rank that has the fewest actions of the stage as the one that should have none."""
    places = {r: [(r, i) for i, a in enumerate(row) if a.stage == stage] for r, row in enumerate(table.rows)}
    home, *_, stray = sorted((r for r in places if places[r]), key=lambda r: -len(places[r]))
    rank, index = places[stray][0]
    action = table.rows[rank][index]
    if len(places[home]) == len(places[stray]):
        other = table.rows[home][places[home][0][1]]
        return TableError(
            f"{table.name}: rank {home} has {other} and rank {rank} has {action}, but a stage is on one rank; give "
            f"both to the same",
            [*places[home], *places[stray]],
        )
    return TableError(f"{table.name}: rank {rank} has {action}, but stage {stage} is on rank {home}", places[stray])


def _stuck(table: Table, position: Sequence[int], made: set[Value]) -> TableError:
    """Follows the waits from a stuck rank until they close a circle or end at a value that nothing makes."""
    maker = {value: (rank, action) for rank, row in enumerate(table.rows) for action in row for value in makes(action)}
    rank = next(r for r, row in enumerate(table.rows) if position[r] < len(row))
    steps: list[tuple[int, Action, Value]] = []
    while rank not in [step[0] for step in steps]:
        action = table.rows[rank][position[rank]]
        missing = next(v for v in needs(action) if v not in made and not is_given(v, table.num_stages))
        steps.append((rank, action, missing))
        if missing not in maker:
            return TableError(
                f"{table.name}: rank {rank} cannot run {action}: it needs the {missing.kind} before stage "
                f"{missing.place} of microbatch {missing.microbatch}, which no action makes",
                [(rank, position[rank])],
            )
        rank = maker[missing][0]
    circle = steps[[step[0] for step in steps].index(rank) :]
    parts, cycle = [], []
    for index, (_, action, value) in enumerate(circle):
        owner, source = maker[value]
        blocked = circle[(index + 1) % len(circle)][1]
        parts.append(
            f"{action} needs {_what(value)} {source}, which rank {owner} runs"
            + (f" after {blocked}" if blocked != source else " next")
        )
        # A rank may be stuck at just what another waits for.
        cycle += [a for a in (action, source) if a not in cycle]
    rank, action, _ = circle[0]
    if len(circle) > 1:
        parts[-1] += f": a circle {' <- '.join(map(str, [*cycle, cycle[0]]))}"
    else:
        parts[-1] += " in the same row"
    places = [(r, position[r]) for r, _, _ in circle]
    return TableError(f"{table.name}: rank {rank} cannot run {action}: {'; '.join(parts)}", places, cycle)


_WORDS = {"activation": "the activation of", "gradient": "the gradient of", "saved": "what is saved by"}


def _what(value: Value) -> str:
    return _WORDS.get(value.kind, "what is kept by")
