"""What the schedules share: warmup, steady and cooldown; backwards in two; rows written as phases."""

from collections.abc import Callable, Sequence
from itertools import islice

from step5_orchestrator.actions import Action
from step5_orchestrator.table import Table, make_table

# What one rank's row takes from its number: forwards ahead, or input backwards between an I and its W.
OfRank = Callable[[int], int]


def phases(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def in_two(row: Sequence[Action], lag: int) -> list[Action]:
    """The row with each B as I and W: the W comes after `lag` more I, those that are left at the end."""
    split: list[Action] = []
    later: list[Action] = []
    for action in row:
        if action.op != "B":
            split.append(action)
            continue
        stage, _, m = action
        split.append(Action(stage, "I", m))
        later.append(Action(stage, "W", m))
        if len(later) > lag:
            split.append(later.pop(0))
    return split + later


def loop_table(
    name: str, num_ranks: int, num_chunks: int, order: Sequence[tuple[int, int]], warmup: OfRank
) -> Table:  # fmt: skip
    """The table whose rank r has stages r, P+r, 2P+r, ...: chunk c is stage cP+r.

    order: (chunk, microbatch) of a rank's forwards; its backwards go in the same order with the chunks reversed.
    warmup: `warmup(r)` forwards come ahead of rank r's first pair of a forward and a backward.
    """
    rows = []
    for rank in range(num_ranks):
        forwards = [Action(chunk * num_ranks + rank, "F", m) for chunk, m in order]
        backwards = [Action((num_chunks - 1 - chunk) * num_ranks + rank, "B", m) for chunk, m in order]
        rows.append(phases(forwards, backwards, warmup(rank)))
    return make_table(name, rows)


def one_stage_a_rank(
    name: str, num_ranks: int, num_microbatches: int, warmup: OfRank, lag: OfRank | None = None
) -> Table:  # fmt: skip
    """The table whose rank r runs stage r, with `warmup(r)` forwards ahead.

    lag: splits each backward; W comes `lag(r)` more I after its own. None: backwards stay whole.
    """
    table = loop_table(name, num_ranks, 1, [(0, m) for m in range(num_microbatches)], warmup)
    if lag is None:
        return table
    return make_table(name, [in_two(row, lag(rank)) for rank, row in enumerate(table.rows)])


def v_row(rank: int, num_ranks: int, num_microbatches: int, *written: tuple[int, str]) -> list[Action]:
    """Rank r's row in the V placement, where it has stages r (chunk a) and 2P-1-r (chunk b).

    written: phases as (times, cells), such as (3, "Fb Ib W"): three times the next forward of chunk b, the next
    backward of chunk b (I, or B where it stays whole), and the oldest W still to come. What has run out is left out.
    """
    stages = {"a": rank, "b": 2 * num_ranks - 1 - rank}
    microbatches = {kind + chunk: iter(range(num_microbatches)) for kind in ("forward", "backward") for chunk in "ab"}
    row: list[Action] = []
    later: list[Action] = []
    for times, cells in written:
        for cell in cells.split() * times:
            op, chunk = cell[0], cell[1:]
            if op == "W":
                row.extend(later[:1])
                del later[:1]
                continue
            kind = "forward" if op == "F" else "backward"
            for m in islice(microbatches[kind + chunk], 1):
                row.append(Action(stages[chunk], op, m))
                if op == "I":
                    later.append(Action(stages[chunk], "W", m))
    return row
