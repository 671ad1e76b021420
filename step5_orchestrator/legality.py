"""Which tables can run: complete, each stage on one rank, in a possible order, within the memory."""

from collections.abc import Sequence

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
    _ = table.order
    if caps is not None:
        _within(table, caps)


def _seen_once(table: Table) -> set[Action]:
    seen: set[Action] = set()
    for rank, row in enumerate(table.rows):
        for index, action in enumerate(row):
            if action in seen:
                places = [(r, i) for r, other in enumerate(table.rows) for i, a in enumerate(other) if a == action]
                owners = sorted({r for r, _ in places} - {rank})
                where = f"a second time; rank {owners[0]} has it too" if owners else "a second time"
                raise TableError(f"{table.name}: rank {rank} has {action} {where}", places)
            if action.op not in OPS or action.stage < 0 or action.microbatch < 0:
                raise TableError(
                    f"{table.name}: rank {rank} has {action}, which is no stage and microbatch from 0 on with an op of "
                    f"{', '.join(OPS)}",
                    [(rank, index)],
                )
            seen.add(action)
    return seen


def _complete(table: Table, found: set[Action], rank_of: Sequence[int], forward_only: bool) -> None:
    lacking: dict[int, list[str]] = {}
    for stage in range(table.num_stages):
        for m in range(table.num_microbatches):
            has_f, has_b, has_i, has_w = ((stage, op, m) in found for op in OPS)
            if has_b and (has_i or has_w):
                raise TableError(
                    f"{table.name}: rank {rank_of[stage]} has {stage}B{m} and {stage}{'I' if has_i else 'W'}{m}; a "
                    f"backward is whole (B) or split (I and W), not both",
                    _places(table, rank_of[stage], stage, m, "BIW"),
                )
            if forward_only and (has_b or has_i or has_w):
                raise TableError(f"{table.name}: stage {stage} goes backward on microbatch {m} in a forward-only table")
            missing = [] if has_f else ["F"]
            if not forward_only and not has_b:
                missing += [op for op, has in (("I", has_i), ("W", has_w)) if not has] if has_i or has_w else ["B"]
            if missing:
                lacking.setdefault(rank_of[stage], []).extend(f"{stage}{op}{m}" for op in missing)
    for rank, cells in lacking.items():
        more = f" and {len(cells) - 5} more" if len(cells) > 5 else ""
        raise TableError(
            f"{table.name}: rank {rank} lacks {', '.join(cells[:5])}{more}: every stage goes forward and backward once "
            f"on each of microbatches 0..{table.num_microbatches - 1}"
        )


def _paired(table: Table) -> None:
    for rank, row in enumerate(table.rows if table.pairs else ()):
        for index, action in enumerate(row):
            if action in table.pairs and (
                action.op != "F" or index + 1 == len(row) or row[index + 1].op not in ("B", "I")
            ):
                raise TableError(
                    f"{table.name}: rank {rank} pairs {action} with what follows it, but a pair is a forward and then "
                    f"a backward",
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


def _places(table: Table, rank: int, stage: int, m: int, ops: str) -> list[tuple[int, int]]:
    wanted = {(stage, op, m) for op in ops}
    return [(rank, index) for index, action in enumerate(table.rows[rank]) if action in wanted]
