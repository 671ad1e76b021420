"""Which tables can run: complete, each stage on one rank, in a possible order, within the memory."""

from collections.abc import Callable, Sequence
from itertools import islice

from step5_orchestrator.actions import OPS, Action, ends_flight
from step5_orchestrator.collector import paused_collector
from step5_orchestrator.table import Table, TableError


@paused_collector()
def check(table: Table, caps: Sequence[int] | None = None, *, forward_only: bool = False) -> None:
    """Raises TableError unless the table can run and trains on every microbatch exactly once.

    Every stage runs F once on every microbatch, and B once or I and W once each; one rank runs a stage; the rows can be
    run to their ends. caps: the most chunk activations that each rank may hold. forward_only: F alone, for evaluation.

    Deadlock is no further question: where one order of all actions exists, lowering places both ends of every message
    by it, and then even messages that block until they are taken, in posting order, come to an end.
    """
    try:
        _check(table, caps, forward_only)
    except TableError as error:
        error.table = table
        raise


def _check(table: Table, caps: Sequence[int] | None, forward_only: bool) -> None:
    if not table.rows:
        raise TableError(f"{table.name}: a table has at least one rank")
    found = _seen_once(table)
    rank_of = table.rank_of_stage
    empty = next((rank for rank, row in enumerate(table.rows) if not row), None)
    if empty is not None:
        raise TableError(f"{table.name}: rank {empty} has no action, and each of the {table.num_ranks} ranks needs one")
    _complete(table, found, rank_of, forward_only)
    _paired(table)
    _ = table.order  # raises where there is none
    if caps is not None:
        _within(table, caps)


def _seen_once(table: Table) -> set[Action]:
    seen: set[Action] = set()
    for rank, row in enumerate(table.rows):
        for index, action in enumerate(row):
            if action in seen:
                places = [(r, i) for r, other in enumerate(table.rows) for i, a in enumerate(other) if a == action]
                owners = sorted({r for r, _ in places} - {rank})
                where = f", and rank {owners[0]} has it too" if owners else " a second time"
                raise TableError(f"{table.name}: rank {rank} has {action}{where}: every action runs once", places)
            if action.op not in OPS or action.stage < 0 or action.microbatch < 0:
                raise TableError(
                    f"{table.name}: rank {rank} has {action}, but an action is a stage from 0 on, one of the ops "
                    f"{', '.join(OPS)}, and a microbatch from 0 on",
                    [(rank, index)],
                )
            seen.add(action)
    return seen


def _complete(table: Table, found: set[Action], rank_of: Sequence[int], forward_only: bool) -> None:
    ops = [action.op for action in found]
    wanted = table.num_stages * table.num_microbatches
    if not forward_only and ops.count("F") == ops.count("B") == wanted == len(ops) / 2:
        return  # the usual case, quickly: no action occurs twice, so these are all
    forward, whole, inputs, weights = ({(s, m) for s, o, m in found if o == op} for op in OPS)
    split = inputs | weights
    wrong = whole | split if forward_only else whole & split
    if wrong:
        stage, m = min(wrong)
        places = _places(table, lambda a: (a.stage, a.microbatch) == (stage, m) and a.op != "F")
        rank, index = places[0]
        if forward_only:
            has, why = f"{table.rows[rank][index]}", "but a forward-only table goes nowhere backward"
        else:
            has = f"{stage}B{m} and {stage}{'I' if (stage, m) in inputs else 'W'}{m}"
            why = "but a backward is whole (B) or split (I and W)"
        raise TableError(f"{table.name}: rank {rank} has {has}, {why}", places)

    def lacking(stage: int, m: int) -> list[Action]:
        key = (stage, m)
        missing = "" if key in forward else "F"
        if not forward_only and key not in whole:
            missing += ("" if key in inputs else "I") + ("" if key in weights else "W") if key in split else "B"
        return [Action(stage, op, m) for op in missing]

    _lacks_nothing(table, rank_of, lacking, "forward" if forward_only else "forward and backward")


def _lacks_nothing(table: Table, rank_of: Sequence[int], lacking: Callable, goes: str) -> None:
    microbatches = range(table.num_microbatches)
    # Takes time by the actions that are there, not by the numbers that they name, which one wrong digit makes huge:
    # each (stage, microbatch) that lacks nothing has its actions in the table, and the search ends at those that lack.
    first = next((a for stage in range(table.num_stages) for m in microbatches for a in lacking(stage, m)), None)
    if first is None:
        return
    rank = rank_of[first.stage]
    all_of_rank = (a for stage in table.stages_of(rank) for m in microbatches for a in lacking(stage, m))
    cells = [str(action) for action in islice(all_of_rank, 6)]
    if len(cells) == 6:
        cells[4:] = [f"{cells[4]} and more"]
    # To mark: what belongs to it, or else the same microbatch elsewhere, or else who names so many microbatches.
    last, because = len(microbatches) - 1, ""
    places = _places(table, lambda a: (a.stage, a.microbatch) == (first.stage, first.microbatch))
    places = places or _places(table, lambda a: a.microbatch == first.microbatch)
    if not places:
        places = _places(table, lambda a: a.microbatch == last)[:1]
        because = "".join(f", and rank {r} has {table.rows[r][i]}" for r, i in places)
    raise TableError(
        f"{table.name}: rank {rank} lacks {', '.join(cells)}: every stage goes {goes} once on each of microbatches "
        f"0..{last}{because}",
        places,
    )


def _paired(table: Table) -> None:
    for rank, row in enumerate(table.rows if table.pairs else ()):
        for index, action in enumerate(row):
            if action not in table.pairs:
                continue
            second = row[index + 1] if index + 1 < len(row) else None
            if action.op != "F" or second is None or second.op not in ("B", "I"):
                raise TableError(
                    f"{table.name}: rank {rank} pairs {action} with {second or 'nothing'}, but a pair is a forward and "
                    f"then a backward (B or I)",
                    [(rank, index)],
                )


def _within(table: Table, caps: Sequence[int]) -> None:
    for rank, row in enumerate(table.rows):
        held = 0
        for index, action in enumerate(row):
            held += (action.op == "F") - ends_flight(action)
            if held > caps[rank]:
                raise TableError(
                    f"{table.name}: rank {rank} holds {held} chunk activations after {action}, more than its memory "
                    f"cap of {caps[rank]}",
                    [(rank, index)],
                )


def _places(table: Table, is_meant: Callable[[Action], bool]) -> list[tuple[int, int]]:
    return [(r, i) for r, row in enumerate(table.rows) for i, action in enumerate(row) if is_meant(action)]
