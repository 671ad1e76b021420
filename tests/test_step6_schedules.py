"""Step 6: what each schedule's table promises, against other people's numbers and against closed forms."""

import json
from itertools import pairwise

import pytest

from step5_orchestrator.actions import Action, is_given, makes, needs
from step5_orchestrator.costs import UNIT_COST, costs, read_costs
from step5_orchestrator.legality import check
from step5_orchestrator.naive import naive
from step5_orchestrator.prediction import bubble, makespan, peak_in_flight, timing
from step5_orchestrator.table import TableError
from step6_schedules.bfs import bfs
from step6_schedules.dual_pipe_v import dualpipe_v
from step6_schedules.filling import fill_with_weights
from step6_schedules.gpipe import gpipe
from step6_schedules.interleaved import groups, interleaved, interleaved_order
from step6_schedules.one_f_one_b import one_f_one_b
from step6_schedules.phases import in_two, loop_table, v_row
from step6_schedules.v_shaped import zb_v
from step6_schedules.zero_bubble import zb_h1, zb_h2
from tests.ranks import ROOT

ALL = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "bfs": bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
CHUNKED = ("interleaved", "bfs")
# F, I, W: equal, and what the closed forms for W <= F, I allow besides.
SPLIT_COSTS = [costs(F=1, I=1, W=1), costs(F=1, I=2, W=1), costs(F=3, I=2, W=1), costs(F=18.5, I=18.0, W=9.25)]


def facts(name):
    return json.loads((ROOT / "tests" / "data" / f"{name}.json").read_text())["rows"]


def write(schedule, num_ranks, num_microbatches, num_chunks=None, **more):
    if schedule in CHUNKED and num_chunks:
        more["num_chunks"] = num_chunks
    return ALL[schedule](num_ranks, num_microbatches, **more)


def longest_span(table, cost):
    times = timing(table, cost)
    return max(max(times[a][1] for a in row) - min(times[a][0] for a in row) for row in table.rows)


def can(schedule, num_ranks, num_microbatches):
    return schedule != "dualpipe-v" or num_microbatches >= 2 * num_ranks


# Other people's numbers


def best_rows(schedule):
    """For each size and cost, the rows of the facts with the best makespan; and how many rows there are in all."""
    by_size = {}
    for row in facts("schedules"):
        if row["schedule"] == schedule:
            size = (row["num_ranks"], row["num_microbatches"], row["num_chunks"], row["cost"])
            by_size.setdefault(size, []).append(row)
    best = {
        size: [row for row in rows if row["makespan"] == min(r["makespan"] for r in rows)]
        for size, rows in by_size.items()
    }
    return best, sum(map(len, by_size.values()))


@pytest.mark.parametrize(
    ("schedule", "num_rows", "by_cost"),
    [
        ("naive", 30, False),
        ("gpipe", 30, False),
        ("1f1b", 56, False),
        ("interleaved", 64, False),
        ("bfs", 34, False),
        ("zb-h1", 30, False),
        ("zb-h2", 30, False),
        ("zb-v", 60, False),
        ("zb-v", 60, True),
        ("dualpipe-v", 36, False),
    ],
)
def test_no_published_order_is_faster_or_takes_less_memory(schedule, num_rows, by_cost):
    best, found = best_rows(schedule)
    assert found == num_rows
    for (num_ranks, num_microbatches, num_chunks, text), rows in best.items():
        cost = read_costs("cost", text)
        table = write(schedule, num_ranks, num_microbatches, num_chunks, **({"cost": cost} if by_cost else {}))
        check(table)
        size = (num_ranks, num_microbatches, num_chunks, text)
        assert makespan(table, cost) <= rows[0]["makespan"], size
        peaks = peak_in_flight(table)
        assert any(all(p <= q for p, q in zip(peaks, row["peak_in_flight"], strict=True)) for row in rows), size


def test_every_row_of_the_facts_belongs_to_a_schedule():
    assert len(facts("schedules")) == 370
    assert {row["schedule"] for row in facts("schedules")} == set(ALL)


@pytest.mark.parametrize("row", facts("zero_bubble_paper"), ids=lambda r: f"{r['schedule']}-{r['num_microbatches']}")
def test_published_bubble_rates(row):
    cost = costs(F=row["F_ms"], I=row["I_ms"], W=row["W_ms"], comm=row["message_ms"])
    table = write(row["schedule"], row["num_ranks"], row["num_microbatches"])
    span = longest_span(table, cost)
    work = row["num_microbatches"] * (row["F_ms"] + row["I_ms"] + row["W_ms"])
    assert round((span - work) / span, 4) == row["bubble_rate"]


@pytest.mark.parametrize("cost", ["F=1,I=1,W=1", "F=1,I=2,W=1"])
def test_nothing_is_faster_than_zb_h1_in_its_memory(cost):
    wanted = {"cost": cost, "placement": "loop", "num_chunks": 1}
    proved = [row for row in facts("optimal_makespans") if wanted.items() <= row.items()]
    proved = [row for row in proved if row["memory_cap"] == row["num_ranks"]]
    assert len(proved) >= 8
    for row in proved:
        table = zb_h1(row["num_ranks"], row["num_microbatches"])
        assert makespan(table, read_costs("cost", cost)) == row["optimal_makespan"], row


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("naive", 0.750), ("gpipe", 0.273), ("1f1b", 0.273), ("interleaved", 0.158), ("zb-h1", 0.111)],
)
def test_the_bubbles_of_the_lesson(schedule, expected):
    assert round(bubble(write(schedule, 4, 8), costs(F=1, B=2)), 3) == expected


# Closed forms


def check_closed_forms(schedule, P, M, num_chunks):
    """The makespan, longest span and peaks of one size, wherever the formula is stated."""
    fused, unit = costs(F=1, B=2), SPLIT_COSTS[0]
    V = num_chunks if schedule in CHUNKED else 1
    table = write(schedule, P, M, V)
    peaks = peak_in_flight(table)
    size = (P, M, V)
    if schedule == "naive":
        assert (makespan(table, fused), peaks) == (M * P * 3, [1] * P), size
    elif schedule in ("gpipe", "1f1b"):
        held = [M if schedule == "gpipe" else min(M, P - r) for r in range(P)]
        assert (makespan(table, fused), peaks) == ((M + P - 1) * 3, held), size
    elif schedule in CHUNKED:
        largest = -(-M // max(1, M // P))
        ahead = [2 * (P - 1 - r) + (V - 1) * largest for r in range(P)]
        held = [M * V if schedule == "bfs" else min(M * V, a + 1) for a in ahead]
        assert (makespan(table, fused), peaks) == (max(M * V + P - 1, P * V + M - 1) * 3, held), size
    elif schedule == "dualpipe-v":
        assert (makespan(table, unit), peaks) == (6 * M + P - 1, [2 * P + 1] * P), size
    elif schedule == "zb-v":
        assert max(peaks) == min(2 * M, 2 * P), size
        if M >= 2 * P - 1:
            assert (makespan(table, unit), longest_span(table, unit), peaks) == (6 * M + P - 1, 6 * M, [2 * P] * P), (
                size
            )
    else:
        assert peaks == [min(M, P if schedule == "zb-h1" else 2 * P - 1)] * P, size
        if schedule == "zb-h1" or M >= P:
            assert makespan(table, unit) == max(3 * M + P - 1, 2 * (M + P - 1) + 1), size
        for cost in SPLIT_COSTS if M >= P else ():
            each, chain = cost.F + cost.I + cost.W, (M + P - 1) * (cost.F + cost.I) + cost.W
            more = cost.F + cost.I - cost.W if schedule == "zb-h1" else cost.F
            assert makespan(table, cost) == pytest.approx(max(M * each + (P - 1) * more, chain)), size
            if schedule == "zb-h2" and M >= 2 * P - 1:
                span = M * each + (P - 1) * (cost.F + cost.I - 2 * cost.W)
                assert longest_span(table, cost) == pytest.approx(span), size


@pytest.mark.parametrize("schedule", ALL)
def test_closed_forms(schedule):
    sizes = [(P, M, 1 + (P + M) % 3) for P in (1, 2, 3, 4, 5) for M in range(1, 13)]
    for P, M, V in [*sizes, (16, 31, 2), (16, 64, 2)]:
        if can(schedule, P, M):
            check_closed_forms(schedule, P, M, V)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ALL)
def test_closed_forms_up_to_16_ranks_and_64_microbatches(schedule):
    for P in range(1, 17):
        for M in sorted({*range(1, 65, 6), P - 1, P, P + 1, 2 * P - 2, 2 * P - 1, 2 * P, 63, 64}):
            if M and can(schedule, P, M):
                check_closed_forms(schedule, P, M, 1 + (P + M) % 4)


@pytest.mark.parametrize(
    ("P", "V", "M", "expected"), [(3, 2, 4, 20), (4, 2, 6, 30), (4, 2, 10, 46), (4, 2, 9, 42), (5, 3, 31, 194)]
)
def test_interleaving_where_the_ranks_do_not_divide_the_microbatches(P, V, M, expected):
    assert makespan(interleaved(P, M, V), costs(F=1, B=1)) == expected


# Rows


@pytest.mark.parametrize("schedule", ALL)
def test_every_table_is_legal_and_adds_in_ascending_order(schedule):
    for P in range(1, 9):
        for M in range(1, 17):
            for V in (1, 2, 3) if schedule in CHUNKED else (None,):
                if can(schedule, P, M):
                    table = write(schedule, P, M, V)
                    check(table)
                    assert table.unordered_stages == (), (P, M, V)
                    assert table.name == schedule
                    assert (table.num_ranks, table.num_microbatches) == (P, M)


@pytest.mark.parametrize("schedule", ["interleaved", "bfs", "zb-v", "dualpipe-v"])
def test_placement(schedule):
    table = write(schedule, 4, 8)
    is_loop = schedule in CHUNKED
    assert [table.stages_of(r) for r in range(4)] == [[r, r + 4 if is_loop else 7 - r] for r in range(4)]


def test_interleaved_order_goes_group_by_group():
    assert interleaved_order(2, 4, 2) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert interleaved_order(3, 2, 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert interleaved_order(2, 5, 1) == [(0, m) for m in range(5)]


@pytest.mark.parametrize(
    ("P", "M", "sizes"),
    [(4, 8, [4, 4]), (4, 10, [5, 5]), (4, 9, [5, 4]), (3, 10, [4, 3, 3]), (4, 3, [3]), (5, 31, [6, 5, 5, 5, 5, 5])],
)
def test_groups_are_balanced(P, M, sizes):
    found = groups(P, M)
    assert [len(group) for group in found] == sizes
    assert [m for group in found for m in group] == list(range(M))


def test_a_last_group_smaller_than_the_ranks_can_deadlock():
    """Why the groups are balanced: 31 microbatches in groups of 6 leave 1."""
    order = [(chunk, m) for start in range(0, 31, 6) for chunk in range(3) for m in range(start, min(start + 6, 31))]
    with pytest.raises(TableError, match="a circle"):
        check(loop_table("groups of 6", 5, 3, order, lambda rank: 2 * (4 - rank) + 2 * 6))


def text(row):
    return " ".join(map(str, row))


def test_a_backward_in_two():
    row = [Action(0, op, m) for m in range(3) for op in "FB"]
    assert text(in_two(row, 0)) == "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"
    assert text(in_two(row, 1)) == "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2"
    assert text(in_two(row, 9)) == "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"


def test_a_row_in_the_v_placement():
    assert text(v_row(1, 3, 2, (2, "Fa Fb"), (1, "Ib W Ba"), (3, "Ba Ib"), (1, "W"))) == (
        "1F0 4F0 1F1 4F1 4I0 4W0 1B0 1B1 4I1 4W1"
    )


def test_dualpipe_v_says_what_it_needs():
    message = "dualpipe-v needs at least twice as many microbatches as ranks: 8 for 4 ranks, not 7"
    with pytest.raises(TableError, match=f"^{message}$"):
        dualpipe_v(4, 7)


def test_dualpipe_v_pairs_forwards_of_one_chunk_with_backwards_of_the_other():
    table = dualpipe_v(4, 10)
    for rank, row in enumerate(table.rows):
        followed = [(a, b) for a, b in pairwise(row) if a in table.pairs]
        assert all(b.op == "B" and a.stage + b.stage == 7 for a, b in followed)
        # Of the 20 forwards, 8 to 11 are done when the pairs begin.
        assert len(followed) == 20 - (2 * (3 - rank) + 2 * (rank + 1) + 3 - rank) - (rank == 3)
    assert table.cells(0)[-11:-8] == ["7B8", "(7F9;0B5)OVERLAP_F_B", "7B9"]


# Filling


def unfilled(num_ranks, num_microbatches):
    table = zb_v(num_ranks, num_microbatches)
    return [[action for action in row if action.op != "W"] for row in table.rows]


@pytest.mark.parametrize("cost", [*SPLIT_COSTS, costs(F=2, I=3, W=1, comm=1.5)])
def test_weights_go_only_where_a_rank_would_wait_or_has_no_room(cost):
    """And a rank never waits while it has a weight gradient to do."""
    cap = 8
    table = fill_with_weights("filled", unfilled(4, 9), cap, cost)
    check(table, [cap] * 4)
    times = timing(table, cost)
    num_stages = table.num_stages
    there = {}
    for action, (_, end) in times.items():
        for value in makes(action):
            moves = value.kind in ("activation", "gradient") and 0 < value.place < num_stages
            crosses = moves and table.rank_of_stage[value.place] != table.rank_of_stage[value.place - 1]
            there[value] = end + (cost.comm if crosses else 0)
    for row in table.rows:
        held, later, free = 0, 0, 0.0
        for index, action in enumerate(row):
            start, end = times[action]
            if action.op == "W":
                following = next((a for a in row[index:] if a.op != "W"), None)
                if following is not None:
                    ready = max((there[v] for v in needs(following) if not is_given(v, num_stages)), default=0.0)
                    assert ready > start or (following.op == "F" and held == cap), action
            elif start > free:
                assert later == 0, action
            held += (action.op == "F") - (action.op == "W")
            later += (action.op == "I") - (action.op == "W")
            free = end


def test_zb_v_knows_the_costs_it_is_given():
    slow_weights = costs(F=1, I=1, W=4)
    assert makespan(zb_v(4, 6, slow_weights), slow_weights) < makespan(zb_v(4, 6), slow_weights)
    assert zb_v(4, 6) == zb_v(4, 6, UNIT_COST)
