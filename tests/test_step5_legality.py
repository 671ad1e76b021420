"""Step 5: which tables can run. Random legal ones and their mutants, judged by rules of the tests' own, and trained."""

import re
import tracemalloc
from collections import Counter
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from step0_monolith.options import run_program
from step5_orchestrator.actions import Action, parse_action
from step5_orchestrator.grid import marked_rows
from step5_orchestrator.legality import check
from step5_orchestrator.lowering import Receive, Send, lower
from step5_orchestrator.naive import forward_only, naive
from step5_orchestrator.prediction import peak_in_flight, timing
from step5_orchestrator.table import Table, TableError, make_table
from step6_schedules.table import main
from tests.blocking import run_with_blocking_messages
from tests.monolith import small
from tests.random_tables import DURATION, MUTATIONS, is_legal, legal_tables, mutants, waits_for
from tests.ranks import python, torchrun
from tests.trained_once import assert_trained_right, train_once

SETTINGS = partial(
    settings,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
DTYPES = ("float32", "float64", "bfloat16")
ACTION = r"-?\d+[A-Z]-?\d+"


def rows_of(text: str, pairs: str = "", name: str = "drawn") -> Table:
    return make_table(
        name, [list(map(action_of, row.split())) for row in text.split("|")], map(action_of, pairs.split())
    )


def action_of(text: str) -> Action:
    return Action(
        *((int(x) if x.lstrip("-").isdigit() else x) for x in re.fullmatch(r"(-?\d+)(\D)(-?\d+)", text).groups())
    )


def refusal(table: Table, caps=None, forward_only: bool = False) -> TableError:
    with pytest.raises(TableError) as caught:
        check(table, caps, forward_only=forward_only)
    assert caught.value.table is table
    return caught.value


def test_the_rules_here_know_right_from_wrong():
    assert is_legal(rows_of("0F0 0I0 0B1 0W0|1F0 1B0 1F1 1B1".replace("0I0 0B1", "0I0 0F1 0B1")))
    for text in (
        "0F0 0B0|1F0", "0F0 0B0 0B0", "0F0 0B0|0F0 1F0 1B0", "0B0 0F0", "0F0 0W0 0I0", "0F0 0I0", "0F0 0B0 0W0",
        "0F0 0B0|2F0 2B0", "0F0 0B0|", "0F1 0B1", "0F0 0B0 1F0|1B0", "0F0 0B0 0F1 0B1|1F1 1B1 1F0 1B0", "0F0 0X0",
    ):  # fmt: skip
        assert not is_legal(rows_of(text)), text
    assert not is_legal(rows_of("0F0 0F1 0B0 0B1", pairs="0F0"))
    assert is_legal(rows_of("0F0 0F1 0B0 0B1", pairs="0F1"))


def assert_right(table: Table) -> None:
    """Everything that is computed from a legal table, against plain recounts."""
    check(table)
    actions = [action for row in table.rows for action in row]
    there, owner = set(actions), {a.stage: rank for rank, row in enumerate(table.rows) for a in row}
    check(forward_only(table), forward_only=True)

    place = {action: i for i, action in enumerate(table.order)}
    assert len(place) == len(table.order) == len(actions)
    times = timing(table)
    assert times.keys() == there
    for row in table.rows:
        free = 0
        for action in row:
            start, end = times[action]
            before = waits_for(action, there, len(owner))
            assert all(place[b] < place[action] for b in before)
            assert start == max([free, *(times[b][1] for b in before)]), action
            assert end - start == DURATION[action.op]
            free = end
        assert [*row] == sorted(row, key=place.__getitem__)

    lowered = lower(table)
    done, left = run_with_blocking_messages(lowered)
    assert not any(left)
    assert sorted(done) == sorted(actions)
    for rank, row in enumerate(lowered):
        got: set = set()
        for instruction in row:
            if isinstance(instruction, Action):
                stage, op, m = instruction
                wanted = ("activation", stage, m) if op == "F" else ("gradient", stage + 1, m)
                elsewhere = [b for b in waits_for(instruction, there, len(owner)) if owner[b.stage] != rank]
                assert not elsewhere or wanted in got
            elif isinstance(instruction, Receive):
                got.add(tuple(instruction.value))
    sends = sum(isinstance(i, Send) for row in lowered for i in row)
    crossing = sum(owner[s] != owner[s + 1] for s in range(len(owner) - 1))
    assert sends == sum(isinstance(i, Receive) for row in lowered for i in row)
    assert sends == 2 * crossing * table.num_microbatches

    peaks = [max(len(held(row[: i + 1])) for i in range(len(row))) for row in table.rows]
    assert peak_in_flight(table) == peaks
    check(table, peaks)
    for rank, peak in enumerate(peaks):
        caps = [10 * p for p in peaks]
        caps[rank] = peak - 1
        error = refusal(table, caps)
        assert f"rank {rank} holds {peak} chunk activations after" in str(error)
        ((owned, index),) = error.places
        assert owned == rank
        assert len(held(table.rows[rank][: index + 1])) == peak > len(held(table.rows[rank][:index]))

    adds = {s: [a.microbatch for row in table.rows for a in row if a.stage == s and a.op in "BW"] for s in owner}
    assert table.unordered_stages == tuple(s for s in sorted(owner) if adds[s] != sorted(adds[s]))


def held(actions) -> set[tuple[int, int]]:
    """(stage, microbatch) whose activations a rank holds after the actions."""
    return {(a.stage, a.microbatch) for a in actions if a.op == "F"} - {
        (a.stage, a.microbatch) for a in actions if a.op in ("B", "W")
    }


def assert_refused_well(error: TableError, table: Table) -> None:
    """One line that names a rank and an action, both rightly; marks and circle are there."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 1000
    start = re.match(rf"{table.name}: rank (\d+) (has no action|has|lacks|cannot run|pairs)\b", text)
    rank, verb, rest = int(start[1]), start[2], text[start.end() + 1 :]
    assert all(0 <= index < len(table.rows[r]) for r, index in error.places)
    at = [table.rows[r][index] for r, index in error.places]
    if verb == "has no action":
        assert not table.rows[rank]
    elif verb == "lacks":
        lacked = [parse_action(x) for x in re.findall(ACTION, rest.split(":")[0])]
        assert lacked
        assert not {*lacked} & {a for row in table.rows for a in row}
        assert all(table.rank_of_stage[a.stage] == rank for a in lacked)
        assert at
    else:
        named_action = action_of(re.match(ACTION, rest)[0])
        assert named_action in table.rows[rank]
        assert named_action in at
        assert rank in [r for r, _ in error.places]
    assert (verb == "cannot run") == bool(error.cycle)
    assert_circle(error, table)
    assert_marks(table, error.places)


def assert_circle(error: TableError, table: Table) -> None:
    """Each action of the circle waits for the next, for what it makes or for its place in the row."""
    if not error.cycle:
        return
    there = {a for row in table.rows for a in row}
    before = {b: set(row[:i]) for row in table.rows for i, b in enumerate(row)}
    assert len(set(error.cycle)) == len(error.cycle) > 1
    for action, following in zip(error.cycle, [*error.cycle[1:], error.cycle[0]], strict=True):
        assert action in there
        assert following in before[action] or following in waits_for(action, there, table.num_stages)
    # The marked ones are where their ranks are stuck; each other one comes later in a stuck rank's row.
    stuck = {table.rows[r][i] for r, i in error.places}
    assert stuck <= set(error.cycle)
    assert all(a in stuck or before[a] & stuck for a in error.cycle)
    if len(stuck) > 1:
        assert f": a circle {' <- '.join(map(str, [*error.cycle, error.cycle[0]]))}" in str(error)


def assert_marks(table: Table, places) -> None:
    """The picture marks these places and no others, in lines of at most 80 characters."""
    lines = marked_rows(table, places).split("\n")
    assert len(lines) == table.num_ranks
    for rank, (line, row) in enumerate(zip(lines, table.rows, strict=True)):
        assert len(line) <= 80
        assert line == line.rstrip()
        assert line.startswith(f"rank {rank}:")
        assert re.findall(r">([^<>]+)<", line) == [str(row[i]) for r, i in sorted(places) if r == rank]
        runs = [re.findall(ACTION, run) for run in line.split(":", 1)[1].split("...")]
        texts = list(map(str, row))
        if len(runs) == 1:
            assert runs[0] == texts
        for run in runs:
            assert any(texts[i : i + len(run)] == run for i in range(len(texts) + 1))


@SETTINGS(max_examples=150)
@given(legal_tables())
def test_random_legal_tables_are_accepted_and_predicted_right(table):
    assert is_legal(table)
    assert_right(table)


# number of examples, and how many at least of each kind must be refused, or legal where that is likely
@pytest.mark.parametrize(("count", "least"), [(600, 4), pytest.param(4000, 40, marks=pytest.mark.slow)])
def test_each_single_mutation_is_refused_or_still_legal_and_right(count, least):
    verdicts = Counter()

    @SETTINGS(max_examples=count)
    @given(legal_tables(max_stages=5, max_microbatches=3).flatmap(mutants))
    def run(mutant):
        kind, table = mutant
        legal = is_legal(table)
        verdicts[kind, legal] += 1
        if legal:
            assert_right(table)
        else:
            assert_refused_well(refusal(table), table)

    run()
    assert all(verdicts[kind, False] >= least for kind in MUTATIONS), verdicts
    assert all(verdicts[kind, True] >= least // 2 for kind in ("swap", "place")), verdicts


EACH = "every stage goes forward and backward once on each of microbatches"
TWICE = "every action runs once"
AN_ACTION = "but an action is a stage from 0 on, one of the ops F, B, I, W, and a microbatch from 0 on"
NOT_BOTH = "but a backward is whole (B) or split (I and W)"
A_PAIR = "but a pair is a forward and then a backward (B or I)"
# Rows, the sentence after the table's name, the marked actions, and the circle in the sentence.
REFUSED = {
    "a forward is missing": ("0F0 0B0|1B0", f"rank 1 lacks 1F0: {EACH} 0..0", "1B0"),
    "a backward is missing": ("0F0 0B0 0F1|1F0 1B0 1F1 1B1", f"rank 0 lacks 0B1: {EACH} 0..1", "0F1"),
    "a W is missing": ("0F0 0I0", f"rank 0 lacks 0W0: {EACH} 0..0", "0F0 0I0"),
    "an I is missing": ("0F0 0W0", f"rank 0 lacks 0I0: {EACH} 0..0", "0F0 0W0"),
    "a rank leaves a microbatch out": ("0F0 0B0 0F1 0B1|1F0 1B0", f"rank 1 lacks 1F1, 1B1: {EACH} 0..1", "0F1 0B1"),
    "no rank has a microbatch": (
        "0F0 0F2 0B0 0B2|1F0 1B0 1F2 1B2",
        f"rank 0 lacks 0F1, 0B1: {EACH} 0..2, and rank 0 has 0F2",
        "0F2",
    ),
    "one digit too many": (
        "0F0 0F20 0B0 0B20",
        f"rank 0 lacks 0F1, 0B1, 0F2, 0B2, 0F3 and more: {EACH} 0..20, and rank 0 has 0F20",
        "0F20",
    ),
    "forwards only": ("0F0 0F1|1F0 1F1", f"rank 0 lacks 0B0, 0B1: {EACH} 0..1", "0F0"),
    "twice in a row": ("0F0 0F0 0B0", f"rank 0 has 0F0 a second time: {TWICE}", "0F0 0F0"),
    "three times": ("0F0 0B0 0B0 0B0", f"rank 0 has 0B0 a second time: {TWICE}", "0B0 0B0 0B0"),
    "on two ranks": ("0F0 0B0|1F0 1B0 0B0", f"rank 1 has 0B0, and rank 0 has it too: {TWICE}", "0B0 0B0"),
    "one action of a stage elsewhere": (
        "0F0 0B0 0F1|1F0 1B0 1F1 1B1 0B1",
        "rank 1 has 0B1, but stage 0 is on rank 0",
        "0B1",
    ),
    "one action of a stage on an earlier rank": (
        "0F0 0B0 0F1 0B1 1B1|1F0 1B0 1F1",
        "rank 0 has 1B1, but stage 1 is on rank 1",
        "1B1",
    ),
    "no rank has a stage": ("0F0 0B0|2F0 2B0", "rank 1 has 2F0, but no rank has stage 1 of 0..2", "2F0 2B0"),
    "an empty row": ("0F0 0B0||1F0 1B0", "rank 1 has no action, and each of the 3 ranks needs one", ""),
    "an empty table": ("", "rank 0 has no action, and each of the 1 ranks needs one", ""),
    "a negative microbatch": ("0F0 0B0 0F-1 0B-1", f"rank 0 has 0F-1, {AN_ACTION}", "0F-1"),
    "a negative stage": ("0F0 0B0|-1F0 -1B0", f"rank 1 has -1F0, {AN_ACTION}", "-1F0"),
    "an unknown op": ("0F0 0X0", f"rank 0 has 0X0, {AN_ACTION}", "0X0"),
    "B and I": ("0F0 0B0 0I0 0W0", f"rank 0 has 0B0 and 0I0, {NOT_BOTH}", "0B0 0I0 0W0"),
    "B and W": ("0F0 0B0 0W0", f"rank 0 has 0B0 and 0W0, {NOT_BOTH}", "0B0 0W0"),
    "B before F": (
        "0F0 0B0|1B0 1F0",
        "rank 1 cannot run 1B0: 1B0 needs what is saved by 1F0, which rank 1 runs after 1B0 in the same row",
        "1B0",
        "1B0 1F0",
    ),
    "I before F, one rank": (
        "0I0 0F0 0W0",
        "rank 0 cannot run 0I0: 0I0 needs what is saved by 0F0, which rank 0 runs after 0I0 in the same row",
        "0I0",
        "0I0 0F0",
    ),
    "W before I": (
        "0F0 0W0 0I0",
        "rank 0 cannot run 0W0: 0W0 needs what is kept by 0I0, which rank 0 runs after 0W0 in the same row",
        "0W0",
        "0W0 0I0",
    ),
    "microbatches in another order on two ranks": (
        "0F0 0B0 0F1 0B1|1F1 1B1 1F0 1B0",
        "rank 0 cannot run 0B0: 0B0 needs the gradient of 1B0, which rank 1 runs after 1F1; 1F1 needs the activation "
        "of 0F1, which rank 0 runs after 0B0: a circle 0B0 <- 1B0 <- 1F1 <- 0F1 <- 0B0",
        "0B0 1F1",
        "0B0 1B0 1F1 0F1",
    ),
    "a circle of split backwards": (
        "0F0 0I0 0F1 0I1 0W0 0W1|1F0 1F1 1I0 1W0 1I1 1W1",
        "rank 0 cannot run 0I0: 0I0 needs the gradient of 1I0, which rank 1 runs after 1F1; 1F1 needs the activation "
        "of 0F1, which rank 0 runs after 0I0: a circle 0I0 <- 1I0 <- 1F1 <- 0F1 <- 0I0",
        "0I0 1F1",
        "0I0 1I0 1F1 0F1",
    ),
    "a circle that a third rank only waits for": (
        "0F0 0B0 0F1 0B1|1F0 1F1 1B1 1B0|2F0 2B0 2F1 2B1",
        "rank 0 cannot run 0B0: 0B0 needs the gradient of 1B0, which rank 1 runs after 1F1; 1F1 needs the activation "
        "of 0F1, which rank 0 runs after 0B0: a circle 0B0 <- 1B0 <- 1F1 <- 0F1 <- 0B0",
        "0B0 1F1",
        "0B0 1B0 1F1 0F1",
    ),
    "a circle of three ranks": (
        "0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1|1F0 1F1 1B1 1B0|2F0 2F1 2B1 2B0",
        "rank 0 cannot run 0B0: 0B0 needs the gradient of 1B0, which rank 1 runs after 1B1; 1B1 needs the gradient of "
        "2B1, which rank 2 runs next; 2B1 needs the gradient of 3B1, which rank 0 runs after 0B0: a circle 0B0 <- 1B0 "
        "<- 1B1 <- 2B1 <- 3B1 <- 0B0",
        "0B0 1B1 2B1",
        "0B0 1B0 1B1 2B1 3B1",
    ),
    "a circle through chunks": (
        "0F0 2F0 2B0 0B0|3F0 1F0 3B0 1B0",
        "rank 0 cannot run 2F0: 2F0 needs the activation of 1F0, which rank 1 runs after 3F0; 3F0 needs the activation "
        "of 2F0, which rank 0 runs next: a circle 2F0 <- 1F0 <- 3F0 <- 2F0",
        "2F0 3F0",
        "2F0 1F0 3F0",
    ),
}
PAIRED = {
    "a pair at the end of a row": ("0F0 0F1 0B0 0B1", "0B1", f"rank 0 pairs 0B1 with nothing, {A_PAIR}", "0B1"),
    "a pair of forwards": ("0F0 0F1 0B0 0B1", "0F0", f"rank 0 pairs 0F0 with 0F1, {A_PAIR}", "0F0"),
    "a pair with a W": ("0F0 0I0 0F1 0W0 0I1 0W1", "0F1", f"rank 0 pairs 0F1 with 0W0, {A_PAIR}", "0F1"),
}


def assert_sentence(error: TableError, table: Table, sentence: str, marked: str) -> None:
    assert str(error) == f"{table.name}: {sentence}"
    assert " ".join(str(table.rows[rank][index]) for rank, index in error.places) == marked
    assert not is_legal(table)
    assert_refused_well(error, table)


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_what_is_wrong_and_marks_it(case):
    text, sentence, marked, *circle = REFUSED[case]
    table = rows_of(text)
    error = refusal(table)
    assert_sentence(error, table, sentence, marked)
    assert " ".join(map(str, error.cycle)) == "".join(circle)


@pytest.mark.parametrize("case", PAIRED)
def test_a_refused_pair_is_named(case):
    text, pairs, sentence, marked = PAIRED[case]
    table = rows_of(text, pairs)
    assert_sentence(refusal(table), table, sentence, marked)


def test_a_table_without_rows_is_refused():
    assert str(refusal(make_table("none", []))) == "none: a table has at least one rank"


def test_a_rank_over_its_memory_cap_is_named_at_the_action_that_is_too_much():
    table = rows_of("0F0 0F1 0F2 0B0 0B1 0B2|1F0 1I0 1F1 1I1 1W0 1W1 1F2 1B2")
    check(table, [3, 2])
    error = refusal(table, [3, 1])
    assert str(error) == "drawn: rank 1 holds 2 chunk activations after 1F1, more than its memory cap of 1"
    assert error.places == ((1, 2),)
    assert str(refusal(table, [2, 2])).startswith("drawn: rank 0 holds 3 chunk activations after 0F2,")


def test_a_forward_only_table_has_forwards_alone():
    table = rows_of("0F0 0F1|1F0 1F1")
    check(table, forward_only=True)
    error = refusal(rows_of("0F0 0B0|1F0"), forward_only=True)
    assert str(error) == "drawn: rank 0 has 0B0, but a forward-only table goes nowhere backward"
    assert error.places == ((0, 1),)
    error = refusal(rows_of("0F0 0F1|1F0"), forward_only=True)
    assert str(error) == "drawn: rank 1 lacks 1F1: every stage goes forward once on each of microbatches 0..1"


@pytest.mark.parametrize("text", ["0F0 0B0 0F{0} 0B{0}", "0F0 0B0|{0}F0 {0}B0", "0F0 0B0|1F{0} 1B{0} {0}F0 {0}B0"])
@pytest.mark.parametrize("forwards", [False, True])
def test_a_huge_number_takes_no_memory(text, forwards):
    for number in (100_000, 10**9):
        filled = text.format(number)
        table = rows_of(re.sub(r" \d+B\d+", "", filled) if forwards else filled)
        tracemalloc.start()
        try:
            error = refusal(table, forward_only=forwards)
            assert tracemalloc.get_traced_memory()[1] < 300_000
        finally:
            tracemalloc.stop()
        assert str(number) in str(error)
        assert_refused_well(error, table)


@SETTINGS(max_examples=100)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 199)), max_size=6),
    st.sampled_from([1, 10, 10**9 - 1]),
)
def test_long_rows_are_cut_around_their_marks(lengths, places, microbatch):
    rows = [[Action(rank, "F", microbatch + i) for i in range(length)] for rank, length in enumerate(lengths)]
    places = sorted({(r, i) for r, i in places if r < len(rows) and i < lengths[r]})
    # A row shows as many marks as fit; two always do.
    places = [p for p in places if len([q for q in places if q[0] == p[0] and q <= p]) <= 2]
    assert_marks(make_table("long", rows), places)


MARKED = """\
rank 0:  ...  0F8   0B8   0F9   0B9  >0F10< 0B10  0F11  0B11  0F12  0B12  ...
rank 1:  ...  1F28  1B28  1F29  1B29 >1F30< 1B30  1F31  1B31  1F32  1B32  ...
rank 2:  ...  2B8   2F9  >2B9<  2F10  2B10  2F11  ...  2B38  2F39 >2B39<
rank 3:  ...  3B7   3F8   3B8   3F9   3B9   3F10  3B10  3F11  3B11  3F12  ..."""


def test_marks_in_a_long_table_read_like_this():
    assert marked_rows(naive(4, 40), [(0, 20), (1, 60), (2, 19), (2, 79)]) == MARKED


# What the CSV reader finds already, with the cell instead of a picture.
IN_A_CELL = {
    "twice in a row": "B1", "three times": "C1", "on two ranks": "C2", "an empty row": "row 2", "an empty table": "",
    "a negative microbatch": "C1", "a negative stage": "A2", "an unknown op": "B1", "one digit too many": "B1",
}  # fmt: skip


def write_rows(path, text: str):
    path.write_text("\n".join(",".join(row.split()) for row in text.split("|")) + "\n")
    return path


@pytest.mark.parametrize("case", REFUSED)
def test_an_illegal_file_ends_in_one_line_and_a_picture(case, tmp_path, capsys, monkeypatch):
    text, sentence = REFUSED[case][:2]
    path = write_rows(tmp_path / "bad.csv", text)
    monkeypatch.setattr("sys.argv", ["table", str(path)])
    with pytest.raises(SystemExit) as caught:
        run_program(main)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    if case in IN_A_CELL:
        assert err.count("\n") == 1
        assert err.startswith(f"error: {str(path)!r}")
        assert IN_A_CELL[case] in err
        has_a_place = case in ("twice in a row", "three times", "on two ranks", "one digit too many")
        assert bool(re.search(rf">{ACTION}<", out)) == has_a_place == bool(out)
        return
    assert err == f"error: bad.csv: {sentence}\n"
    table = rows_of(text)
    assert out == marked_rows(table, refusal(table).places) + "\n"
    assert re.search(rf">{ACTION}<", out)


def test_a_refused_file_ends_the_program_with_status_2(tmp_path):
    text, sentence = REFUSED["microbatches in another order on two ranks"][:2]
    ran = python("step6_schedules.table", write_rows(tmp_path / "bad.csv", text))
    assert (ran.status, ran.stderr) == (2, f"error: bad.csv: {sentence}\n")
    assert ran.stdout == "rank 0:  0F0 >0B0< 0F1  0B1\nrank 1: >1F1< 1B1  1F0  1B0\n"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["B before F", "a circle of three ranks", "a backward is missing", "twice in a row"])
def test_other_refused_files_end_the_program_with_status_2(case, tmp_path):
    ran = python("step6_schedules.table", write_rows(tmp_path / "bad.csv", REFUSED[case][0]))
    assert ran.status == 2
    assert ran.stderr.count("\n") == 1
    assert "<" in ran.stdout


@pytest.mark.slow
def test_a_rank_over_the_cap_is_marked_by_the_program(tmp_path):
    path = write_rows(tmp_path / "cap.csv", "0F0 0F1 0B0 0B1|1F0 1B0 1F1 1B1")
    ran = python("step6_schedules.table", path, "--memory-cap", "1")
    assert ran.status == 2
    assert ran.stderr == "error: cap.csv: rank 0 holds 2 chunk activations after 0F1, more than its memory cap of 1\n"
    assert ran.stdout.splitlines()[0] == "rank 0:  0F0 >0F1< 0B0  0B1"


@pytest.mark.slow
def test_training_refuses_a_file_before_any_group_opens(tmp_path):
    text, sentence = REFUSED["microbatches in another order on two ranks"][:2]
    path = write_rows(tmp_path / "bad.csv", text)
    ran = torchrun(2, "step6_schedules", "--schedule", path, "--num-microbatches", "2")
    assert ran.status == 1
    assert f"error: bad.csv: {sentence}\n" in ran.stderr
    assert "Traceback" not in ran.text.split("error: bad.csv")[0]
    assert ran.stdout == "rank 0:  0F0 >0B0< 0F1  0B1\nrank 1: >1F1< 1B1  1F0  1B0\n"


def collect(strategy, count: int) -> list[Table]:
    """The same different tables at each call."""
    found: dict[Table, None] = {}

    @SETTINGS(max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def take(table):
        found[table] = None

    take()
    return list(found)


def jobs_of(count: int, each: int) -> dict[int, list[tuple]]:
    """For each number of ranks random legal tables and legal mutants, `each` of both, with configs."""
    tables = legal_tables(max_stages=6, max_microbatches=4)
    moved = tables.flatmap(lambda table: mutants(table, ["swap", "place"]))
    mutated = moved.map(lambda mutant: mutant[1]).filter(is_legal)
    jobs: dict[int, list[tuple]] = {}
    for strategy in (tables, mutated):
        taken: Counter = Counter()
        for table in sorted(collect(strategy, count), key=lambda t: -sum(map(len, t.rows))):
            taken[table.num_ranks] += 1
            if taken[table.num_ranks] <= each:
                # Sums in another order are compared in float64, equal bits in every type.
                dtype = "float64" if table.unordered_stages else DTYPES[taken[table.num_ranks] % len(DTYPES)]
                config = small(num_iterations=1, data="random", dtype=dtype, num_microbatches=table.num_microbatches)
                jobs.setdefault(table.num_ranks, []).append((config, table))
    return jobs


@pytest.mark.parametrize(("count", "each"), [(60, 2), pytest.param(600, 25, marks=pytest.mark.slow)])
def test_random_legal_tables_and_legal_mutants_train(pool, count, each):
    jobs = jobs_of(count, each)
    assert sorted(jobs) == [1, 2, 3, 4]
    for num_ranks, some in jobs.items():
        results = pool.run(num_ranks, train_once, some, limit=100)
        for index, (config, table) in enumerate(some):
            assert_trained_right([rank[index] for rank in results], config, table)
    tables = [table for some in jobs.values() for _, table in some]
    assert len(tables) == 8 * each
    assert any(table.unordered_stages for table in tables)
    assert any(len(table.unordered_stages) < table.num_stages for table in tables)
    assert any("W" in table.ops for table in tables)
    assert any("W" not in table.ops for table in tables)
    assert any(table.pairs for table in tables)
