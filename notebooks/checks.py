"""The check cells of the exercises: each says what is wrong with an answer, and how far it is from right."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from step0_monolith.config import Config
from step0_monolith.data import microbatch_sizes
from step0_monolith.options import UsageError
from step1_partition.partition import bounds, evenly
from step5_orchestrator.actions import parse_action
from step5_orchestrator.costs import UNIT_COST
from step5_orchestrator.legality import check
from step5_orchestrator.prediction import bubble, makespan, peak_in_flight
from step5_orchestrator.table import Table, make_table

NOT_YET = "not done yet: put your answer in place of None in the cell above, and run both again"
RIGHT = "right"
EPSILON = 1e-9


def _say(text: str) -> None:
    print(text)


def microbatches(answer: Sequence[int] | None, rows: int = 7, count: int = 3) -> None:
    """0: the sizes of the microbatches of a batch."""
    if answer is None:
        return _say(NOT_YET)
    sizes = list(answer)
    right = microbatch_sizes(rows, count)
    if sizes == right:
        return _say(f"{RIGHT}: {sizes}")
    if len(sizes) != count:
        return _say(f"not yet: {len(sizes)} sizes for {count} microbatches")
    if sum(sizes) != rows:
        return _say(f"not yet: they add up to {sum(sizes)}, and the batch has {rows} rows")
    if max(sizes) - min(sizes) > 1:
        return _say(f"not yet: they differ by {max(sizes) - min(sizes)}; even pieces differ by one row at most")
    return _say("not yet: the right sizes in another order; the larger ones come first")


def layers_of_stage(answer: Sequence[int] | None, num_layers: int = 10, num_stages: int = 3, stage: int = 1) -> None:
    """1: the layers of one stage of an even partition."""
    if answer is None:
        return _say(NOT_YET)
    start, stop = bounds(evenly(num_layers, num_stages))[stage]
    found = list(answer)
    if found == list(range(start, stop)):
        return _say(f"{RIGHT}: stage {stage} has layers {start} to {stop - 1}")
    if any(b != a + 1 for a, b in itertools.pairwise(found)):
        return _say("not yet: a stage is a contiguous slice, with no layer left out and none twice")
    if len(found) != stop - start:
        return _say(f"not yet: {len(found)} layers, and stage {stage} of an even partition has {stop - start}")
    return _say(f"not yet: as many layers as it should have, but it does not start at layer {found[0]}")


def bytes_sent(answer: Sequence[int] | None, num_ranks: int = 8, num_bytes: int = 512) -> None:
    """2: what each rank of a line sends when one activation goes ahead and one gradient comes back."""
    if answer is None:
        return _say(NOT_YET)
    right = [num_bytes * ((rank < num_ranks - 1) + (rank > 0)) for rank in range(num_ranks)]
    found = list(answer)
    if found == right:
        return _say(f"{RIGHT}: {sum(right)} bytes in all")
    if len(found) != num_ranks:
        return _say(f"not yet: {len(found)} numbers for {num_ranks} ranks")
    rank = next(r for r in range(num_ranks) if found[r] != right[r])
    ends = {0: "it has nobody to send a gradient to", num_ranks - 1: "it has nobody to send an activation to"}
    return _say(
        f"not yet: rank {rank} does not send {found[rank]} bytes; "
        f"{ends.get(rank, 'it sends an activation ahead and a gradient back')}"
    )


def order_of_messages(answer: dict[int, Sequence[str]] | None) -> None:
    """3: an order of blocking messages that ends. Rank 0 sends a0 and a1 and receives g0, rank 1 the other way round.

    answer: for each rank its calls, such as "send a0" and "recv g0". A send returns when the other rank receives.
    """
    if answer is None:
        return _say(NOT_YET)
    wanted = {0: {"send a0", "send a1", "recv g0"}, 1: {"recv a0", "recv a1", "send g0"}}
    for rank, calls in wanted.items():
        own = list(answer.get(rank, ()))
        if set(own) != calls or len(own) != len(calls):
            return _say(f"not yet: rank {rank} makes the calls {', '.join(sorted(calls))}, each once")
    if answer[1].index("recv a0") > answer[1].index("send g0"):
        return _say("not yet: rank 1 cannot send g0 before it has received a0, which g0 is computed from")
    left = [list(answer[0]), list(answer[1])]
    while left[0] and left[1]:
        (way, name), (other, same) = (calls[0].split() for calls in left)
        if name != same or way == other:
            return _say(
                f"deadlock: rank 0 waits in {left[0][0]}, rank 1 waits in {left[1][0]}; they meet only when both "
                f"stand at the two ends of one message"
            )
        left = [calls[1:] for calls in left]
    return _say(f"{RIGHT}: every message finds its other end")


def even_bytes(answer: Sequence[int] | None, num_ranks: int = 3) -> None:
    """4: layers for each rank, so that the largest rank holds as few bytes as possible."""
    if answer is None:
        return _say(NOT_YET)
    config = Config()
    sizes, total = list(answer), config.num_layers
    if len(sizes) != num_ranks or min(sizes) < 1 or sum(sizes) != total:
        return _say(f"not yet: {num_ranks} numbers of at least 1 that add up to {total} layers")

    def largest(cut: Sequence[int]) -> int:
        shapes = [config.shape_of_layer(index) for index in range(total)]
        held = [4 * (n_in * n_out + n_out) for n_in, n_out in shapes]
        return max(sum(held[start:stop]) for start, stop in bounds(list(cut)))

    cuts = [(a, b, total - a - b) for a in range(1, total) for b in range(1, total - a)]
    best = min(map(largest, cuts))
    if largest(sizes) == best:
        return _say(f"{RIGHT}: the largest rank holds {best:,} bytes, and no cut has less")
    return _say(f"not yet: your largest rank holds {largest(sizes):,} bytes; {best:,} can be had")


def table_of(rows: Sequence[str], name: str = "yours") -> Table:
    """A table from text: a line a rank, such as "0F0 0B0". Raises UsageError for what is no action, or cannot run."""
    try:
        table = make_table(name, [[parse_action(cell) for cell in row.split()] for row in rows])
    except ValueError as error:
        raise UsageError(str(error)) from None
    check(table)
    return table


def short_table(answer: Sequence[str] | None, longest: float = 9) -> None:
    """5: a legal table for 2 ranks and 2 microbatches that takes at most so many slots, with F=1 and B=2."""
    if answer is None:
        return _say(NOT_YET)
    try:
        table = table_of(answer)
    except UsageError as error:
        return _say(f"not yet: {error}")
    if (table.num_ranks, table.num_microbatches) != (2, 2):
        return _say(f"not yet: {table.num_ranks} ranks and {table.num_microbatches} microbatches; it should be 2 and 2")
    found = makespan(table)
    if found > longest:
        return _say(f"not yet: legal, but {found:g} slots long; {longest:g} can be had")
    return _say(f"{RIGHT}: {found:g} slots, bubble {bubble(table):.3f}, peak in flight {peak_in_flight(table)}")


def microbatches_for_bubble(answer: int | None, num_ranks: int = 8, below: float = 0.1) -> None:
    """6: the fewest microbatches with which 1F1B's bubble is below a number."""
    from step6_schedules.one_f_one_b import one_f_one_b

    if answer is None:
        return _say(NOT_YET)
    found = bubble(one_f_one_b(num_ranks, answer), UNIT_COST)
    if found >= below - EPSILON:
        return _say(f"not yet: with {answer} microbatches the bubble is {found:.4f}, which is not below {below:g}")
    one_fewer = bubble(one_f_one_b(num_ranks, answer - 1), UNIT_COST) if answer > 1 else 1.0
    if one_fewer < below - EPSILON:
        return _say(f"not yet: {answer} are enough, but so are {answer - 1}")
    return _say(f"{RIGHT}: {found:.4f} with {answer}, and {one_fewer:.4f} with one fewer")


def sheet(answer: str | Path | None, num_microbatches: int = 8) -> None:
    """6: the worksheet, as text (a line a rank, cells between commas) or in a file; each mistake with its reason."""
    from step6_schedules.sheet import draw_sheet, read_sheet, sheet_of
    from step6_schedules.worksheet import verdict

    if answer is None:
        return _say(NOT_YET)
    if isinstance(answer, Path):
        try:
            found = read_sheet(answer, num_microbatches)
        except UsageError as error:
            return _say(f"not yet: {error}")
    else:
        lines = [[cell.strip() for cell in line.split(",")] for line in answer.strip("\n").splitlines()]
        if not any(map(any, lines)):
            return _say(NOT_YET)
        found = sheet_of(lines, num_microbatches)
    print(draw_sheet(found))
    print()
    return _say(verdict(found))


def beats_1f1b(answer: Sequence[str] | None) -> None:
    """7: a table for 2 ranks and 4 microbatches whose bubble is smaller than 1F1B's, in slots F=I=W=1."""
    from step5_orchestrator.costs import costs
    from step6_schedules.one_f_one_b import one_f_one_b

    if answer is None:
        return _say(NOT_YET)
    try:
        table = table_of(answer)
    except UsageError as error:
        return _say(f"not yet: {error}")
    if (table.num_ranks, table.num_microbatches) != (2, 4):
        return _say(f"not yet: {table.num_ranks} ranks and {table.num_microbatches} microbatches; it should be 2 and 4")
    cost = costs(1.0, 2.0, 1.0, 1.0)
    mine, theirs = bubble(table, cost), bubble(one_f_one_b(2, 4), cost)
    if mine >= theirs:
        return _say(f"not yet: legal, with a bubble of {mine:.3f}; 1F1B has {theirs:.3f}")
    return _say(f"{RIGHT}: a bubble of {mine:.3f} instead of {theirs:.3f}")
