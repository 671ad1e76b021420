"""Step 5: actions, tables, their legality and their messages, without any process."""

import itertools

import pytest

from step0_monolith.options import UsageError
from step0_monolith.result import Result
from step5_orchestrator.actions import Action, Value, is_given, makes, needs, parse_action
from step5_orchestrator.costs import UNIT_COST, costs
from step5_orchestrator.emulate import EmulateOptions
from step5_orchestrator.legality import check
from step5_orchestrator.lowering import Receive, Send, lower, post_ahead
from step5_orchestrator.naive import forward_only, naive
from step5_orchestrator.prediction import bubble, makespan, peak_in_flight, timing
from step5_orchestrator.program import report
from step5_orchestrator.table import TableError, make_table
from step6_schedules.phases import one_stage_a_rank
from step6_schedules.placement import placement_of
from step6_schedules.schedules import SCHEDULES
from tests.blocking import run_with_blocking_messages
from tests.ranks import ROOT
from tests.sizes import SIZES, every_size


def rows_of(*texts):
    return make_table("drawn", [[parse_action(cell) for cell in text.split()] for text in texts])


def test_an_action_reads_as_it_is_written():
    assert str(Action(2, "F", 0)) == "2F0"
    assert parse_action("12B34") == Action(12, "B", 34)
    for text in ("", "F0", "2F", "2X0", "2F0 ", "-1F0", "2f0", "2F0x"):
        with pytest.raises(ValueError, match="is not an action"):
            parse_action(text)


def test_needs_and_makes_meet():
    num_stages = 3
    actions = [Action(s, op, 0) for s in range(num_stages) for op in "FB"]
    made = {value for action in actions for value in makes(action)}
    needed = {value for action in actions for value in needs(action)}
    assert needed - made == {Value("activation", 0, 0), Value("gradient", 3, 0)}
    assert all(is_given(v, num_stages) for v in needed - made)
    assert made - needed == {Value("activation", 3, 0), Value("gradient", 0, 0)}


@pytest.mark.parametrize(("schedule", "num_ranks", "num_microbatches"), every_size())
def test_every_schedule_is_legal(schedule, num_ranks, num_microbatches):
    table = SCHEDULES[schedule](num_ranks, num_microbatches)
    check(table)
    check(forward_only(table), forward_only=True)
    num_stages = num_ranks * SCHEDULES[schedule].default_chunks
    assert (table.num_ranks, table.num_stages, table.num_microbatches) == (num_ranks, num_stages, num_microbatches)
    assert ("W" in table.ops) == SCHEDULES[schedule].splits
    assert placement_of(table)[0] == (SCHEDULES[schedule].placement if num_ranks > 1 else "loop")
    assert table.unordered_stages == ()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["0F0 0B0", "1F0"], "rank 1 lacks 1B0"),
        (["0F0 0F0 0B0", "1F0 1B0"], "rank 0 has 0F0 a second time"),
        (["0B0 0F0", "1F0 1B0"], "which rank 0 runs after 0B0: a circle 0B0 <- 1B0 <- 1F0 <- 0F0 <- 0B0"),
        (["0F0 0B0", "1B0 1F0"], "rank 1 cannot run 1B0: 1B0 needs what is saved by 1F0, which rank 1 runs after 1B0"),
        (
            ["0F0 0B0 1F0", "1B0"],
            "rank 0 has 1F0 and rank 1 has 1B0, but a stage is on one rank; give both to the same",
        ),
        (["0F0 0B0", "2F0 2B0"], "no rank has stage 1"),
        (["0F0 0B0", ""], "rank 1 has no action, and each of the 2 ranks needs one"),
        (["0F0 0F2 0B0 0B2", "1F0 1B0 1F2 1B2"], "rank 0 lacks 0F1, 0B1: every stage goes forward and backward once"),
        (
            ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
            "which rank 1 runs after 1F1; 1F1 needs the activation of 0F1, which rank 0 runs after 0B0: a circle",
        ),
    ],
)
def test_illegal_tables_name_rank_action_and_reason(texts, message):
    with pytest.raises(UsageError) as caught:
        check(rows_of(*texts))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("schedule", "num_ranks", "num_microbatches"), every_size())
def test_every_action_starts_after_what_it_needs(schedule, num_ranks, num_microbatches):
    table = SCHEDULES[schedule](num_ranks, num_microbatches)
    times = timing(table)
    ready = {value: times[action][1] for action in times for value in makes(action)}
    for action, (start, end) in times.items():
        assert end - start == {"F": 1, "B": 2, "I": 1, "W": 1}[action.op]
        assert all(ready[v] <= start for v in needs(action) if not is_given(v, table.num_stages))
    for row in table.rows:
        assert all(times[a][1] <= times[b][0] for a, b in itertools.pairwise(row))
    assert list(times) == sorted(times, key=list(times).index)


@pytest.mark.parametrize(("schedule", "num_ranks", "num_microbatches"), every_size())
def test_even_blocking_unbuffered_messages_come_to_an_end(schedule, num_ranks, num_microbatches):
    table = SCHEDULES[schedule](num_ranks, num_microbatches)
    done, left = run_with_blocking_messages(lower(table))
    assert left == [[]] * num_ranks
    assert sorted(done) == sorted(action for row in table.rows for action in row)


def test_receives_just_before_use_deadlock_under_1f1b():
    """The reason for one global order: a receive posted only when its value is needed leaves both sides sending."""
    table = SCHEDULES["1f1b"](2, 3)
    late = []
    for rank, row in enumerate(lower(table)):
        receives = {i.value: i for i in row if isinstance(i, Receive)}
        moved = []
        for instruction in row:
            if isinstance(instruction, Action):
                moved.extend(receives[v] for v in needs(instruction) if v in receives)
            if not isinstance(instruction, Receive):
                moved.append(instruction)
        late.append(moved)
        assert len(moved) == len(row), rank
    _, left = run_with_blocking_messages(late)
    assert all(isinstance(row[0], Send) for row in left)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lowering_adds_exactly_the_messages_that_cross_ranks(schedule):
    table = SCHEDULES[schedule](4, 8)
    lowered = lower(table)
    sends = [(rank, i) for rank, row in enumerate(lowered) for i in row if isinstance(i, Send)]
    receives = [(rank, i) for rank, row in enumerate(lowered) for i in row if isinstance(i, Receive)]
    owners = table.rank_of_stage
    boundaries = sum(a != b for a, b in itertools.pairwise(owners))
    assert boundaries == {4: 3, 8: 6 if SCHEDULES[schedule].placement == "v" else 7}[table.num_stages]
    assert len(sends) == len(receives) == 2 * 8 * boundaries
    assert {(rank, i.peer, i.value) for rank, i in sends} == {(i.peer, rank, i.value) for rank, i in receives}
    for pair in itertools.permutations(range(4), 2):
        sent = [i.value for rank, i in sends if (rank, i.peer) == pair]
        taken = [i.value for rank, i in receives if (i.peer, rank) == pair]
        assert sent == taken


def bytes_of(value):
    """Messages of four sizes."""
    return 100 << (value.microbatch + value.place) % 4


@pytest.mark.parametrize("room", [None, 0, 300, 1000, 10**6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_receives_posted_ahead_keep_the_order_of_each_edge(schedule, room):
    for row in lower(SCHEDULES[schedule](4, 8)):
        early = post_ahead(row) if room is None else post_ahead(row, bytes_of, room)
        assert sorted(map(str, early)) == sorted(map(str, row))
        assert [i for i in early if not isinstance(i, Receive)] == [i for i in row if not isinstance(i, Receive)]
        for peer, kind in itertools.product(range(4), ("activation", "gradient")):
            received, posted = ([i for i in some if isinstance(i, Receive) and i.peer == peer] for some in (row, early))
            assert [i for i in posted if i.value.kind == kind] == [i for i in received if i.value.kind == kind]
        # At least one action earlier, where there is one.
        for receive in (i for i in row if isinstance(i, Receive)):
            before = [i for i in row[: row.index(receive)] if isinstance(i, Action)]
            assert not before or early.index(receive) < early.index(before[-1])


def most_posted(early):
    """For each peer and kind, the most bytes that are posted and not yet taken by an action."""
    held, most = {}, {}
    for instruction in early:
        if isinstance(instruction, Receive):
            edge = (instruction.peer, instruction.value.kind)
            held.setdefault(edge, {})[instruction.value] = bytes_of(instruction.value)
            most[edge] = max(most.get(edge, 0), sum(held[edge].values()))
        elif isinstance(instruction, Action):
            for value in needs(instruction):
                for values in held.values():
                    values.pop(value, None)
    return most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_receives_posted_ahead_keep_to_their_room(schedule):
    rows = lower(SCHEDULES[schedule](4, 8))
    for row in rows:
        least = most_posted(post_ahead(row))
        assert most_posted(post_ahead(row, bytes_of, 0)) == least
        for room in (300, 1000, 2000):
            found = most_posted(post_ahead(row, bytes_of, room))
            assert all(found[edge] <= max(room, least[edge]) for edge in found)
            # No room is left that the next one would have had.
            assert found.keys() == least.keys()
            assert all(found[edge] >= min(room - 799, least[edge]) for edge in found)
        everything = post_ahead(row, bytes_of, 10**6)
        count = sum(isinstance(i, Receive) for i in row)
        assert all(isinstance(i, Receive) for i in everything[:count])


def test_one_rank_has_no_messages():
    assert all(isinstance(i, Action) for i in lower(naive(1, 4))[0])


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_closed_forms(p, m):
    for forward, backward in ((1, 2), (1, 1), (3, 5)):
        cost = costs(forward, backward)
        both = forward + backward
        assert makespan(SCHEDULES["naive"](p, m), cost) == m * p * both
        assert makespan(SCHEDULES["gpipe"](p, m), cost) == (m + p - 1) * both
        assert makespan(SCHEDULES["1f1b"](p, m), cost) == (m + p - 1) * both
        assert bubble(SCHEDULES["1f1b"](p, m), cost) == pytest.approx((p - 1) / (m + p - 1))
        assert bubble(SCHEDULES["naive"](p, m), cost) == pytest.approx(1 - 1 / p)
    assert peak_in_flight(SCHEDULES["naive"](p, m)) == [1] * p
    assert peak_in_flight(SCHEDULES["gpipe"](p, m)) == [m] * p
    assert peak_in_flight(SCHEDULES["1f1b"](p, m)) == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SIZES)
def test_naive_is_the_loop_without_warmup(num_ranks, num_microbatches):
    assert one_stage_a_rank("naive", num_ranks, num_microbatches, lambda rank: 0) == naive(num_ranks, num_microbatches)


def test_the_lesson_draws_the_naive_table_right():
    times = timing(naive(4, 2))
    rows = [["."] * 24 for _ in range(4)]
    for (stage, op, m), (start, end) in times.items():
        rows[stage][int(start) : int(end)] = [f"{op}{m}"] * int(end - start)
    page = (ROOT / "step5_orchestrator" / "README.md").read_text()
    drawn = [line.split()[2:] for line in page.splitlines() if line.startswith("rank ") and " F0 " in line]
    assert drawn == rows


def test_published_bubbles_at_p4_m8():
    found = {name: round(bubble(SCHEDULES[name](4, 8)), 3) for name in SCHEDULES}
    assert found == {
        "naive": 0.75, "gpipe": 0.273, "1f1b": 0.273, "interleaved": 0.158, "bfs": 0.158, "zb-h1": 0.111,
        "zb-h2": 0.111, "zb-v": 0.059, "dualpipe-v": 0.059,
    }  # fmt: skip


def test_a_table_over_other_ranks_than_stages_is_placed_by_its_rows():
    table = rows_of("0F0 2F0 2B0 0B0", "1F0 1B0")
    check(table)
    assert table.rank_of_stage == (0, 1, 0)
    assert table.stages_of(0) == [0, 2]


@pytest.mark.parametrize("text", ["F=5", "F=5,B=x", "F=5,B=-1", "F=5,B=1,F=2", "X=3,F=1,B=1", "", "F5,B3", "F=0,B=1"])
def test_emulate_refuses(text):
    with pytest.raises(UsageError, match="--emulate"):
        EmulateOptions(emulate=text)


def test_emulate_reads():
    assert EmulateOptions(emulate="F=5,B=10.5").emulate == costs(5.0, 10.5)
    assert EmulateOptions().emulate is None
    assert EmulateOptions(emulate=UNIT_COST).emulate == UNIT_COST


def test_a_stuck_table_never_reaches_the_ranks():
    with pytest.raises(TableError):
        lower(rows_of("0B0 0F0", "1F0 1B0"))


@pytest.mark.parametrize(("rows", "says"), [(["0F0 0F1 0B1 0B0"], True), (["0F0 0F1 0B0 0B1"], False)])
def test_a_report_says_when_gradients_are_added_in_another_order(rows, says):
    table = rows_of(*rows)
    result = Result(
        schedule="drawn", num_ranks=1, num_stages=1, num_microbatches=2, losses=[1.0], iteration_seconds=[1.0],
        test_accuracy=None, weights_sha256="00", bubble={"predicted": 0.0, "measured": 0.0}, peak_in_flight=[2],
        bytes_sent=[0],
    )  # fmt: skip
    assert ("adds in another order: the weight gradients of stage 0" in report(result, table, UNIT_COST)) == says
