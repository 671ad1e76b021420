"""Step 6: a schedule drawn by hand on squared paper, checked cell by cell."""

import csv
from random import Random

import pytest

from step0_monolith.options import UsageError
from step5_orchestrator.spreadsheet import read_csv
from step6_schedules.schedules import SCHEDULES
from step6_schedules.sheet import SLOT, draw_sheet, empty_sheet, read_sheet, sheet_of
from step6_schedules.simulate import Simulation
from step6_schedules.worksheet import verdict
from tests.random_tables import is_legal
from tests.ranks import python

WHOLE = ("naive", "gpipe", "1f1b")


def drawn(name: str, p: int, m: int) -> list[list[str]]:
    """A schedule's cells where they stand in time."""
    simulation = Simulation(SCHEDULES[name](p, m), SLOT)
    lines = [[""] * round(simulation.makespan) for _ in range(p)]
    for action, (start, _) in simulation.times.items():
        lines[action.stage][round(start)] = str(action)
    return lines


def reasons(lines: list[list[str]], m: int | None = None) -> list[str]:
    return list(map(str, sheet_of(lines, m).faults))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (3, 5)])
def test_known_schedules_are_legal(name, p, m):
    sheet = sheet_of(drawn(name, p, m))
    assert sheet.faults == sheet.missing == []
    assert (sheet.num_ranks, sheet.num_microbatches) == (p, m)
    assert sheet.table().rows == SCHEDULES[name](p, m).rows
    assert sheet.num_slots == {"naive": 2 * m * p}.get(name, 2 * (m + p - 1))


def test_what_is_said_of_1f1b_and_of_others():
    assert verdict(sheet_of(drawn("1f1b", 4, 8))).splitlines() == [
        "legal: 4 ranks, 8 microbatches",
        "makespan 22 slots (no order is shorter than 22), bubble 0.273",
        "peak in flight 4 3 2 1",
        "this is 1F1B, action by action",
    ]
    assert verdict(sheet_of(drawn("gpipe", 4, 8))).splitlines()[-1] == (
        "not 1F1B: on rank 0 action 5 is 0F4, and 1F1B has 0B0 there; 1F1B takes 22 slots, this 22; a rank of 1F1B "
        "holds at most 4, here 8"
    )
    late = [[*row[:3], "", *row[3:]] for row in drawn("1f1b", 2, 2)]  # a slot in which both ranks rest
    assert verdict(sheet_of(late)).splitlines()[-2:] == [
        "1 slot shorter if every action started as soon as it can",
        "this is 1F1B, action by action, but takes 7 slots instead of 6",
    ]


FAULTS = [
    # rank, slot, new text, place of the fault, reason
    (1, 1, "1F9", (1, 1), "1F9 has no microbatch: they are 0 to 2"),
    (1, 1, "2F0", (1, 1), "2F0 has no stage: the stages are 0 to 1"),
    (1, 1, "0F0", (1, 1), "0F0 belongs to rank 0, which holds stage 0"),
    (1, 1, "1f0", (1, 1), "1f0 cannot be read: ops are capital letters; write 1F0"),
    (1, 1, "1W0", (1, 1), "1W0 is no forward and no backward: here the ops are F and B"),
    (0, 3, "0F0", (0, 3), "0F0 has run already, in slot 0"),
    (1, 0, "1F0", (1, 0), "1F0 needs the activation of 0F0, which rank 0 runs in the same slot: it is there from slot 1 on"),  # noqa: E501
    (0, 2, "0B0", (0, 2), "0B0 needs the gradient of 1B0, which rank 1 runs in the same slot: it is there from slot 3 on"),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("rank", "slot", "text", "place", "reason"), FAULTS)
def test_each_kind_of_fault_has_its_reason(rank, slot, text, place, reason):
    lines = drawn("1f1b", 2, 3)
    lines[rank][slot] = text
    found = {(fault.rank, fault.slot): f"{fault.text} {fault.reason}" for fault in sheet_of(lines, 3).faults}
    assert found[place] == reason


def test_a_value_that_is_nowhere_and_what_is_missing():
    lines = drawn("1f1b", 2, 2)
    lines[0][0] = ""
    sheet = sheet_of(lines, 2)
    assert list(map(str, sheet.faults)) == [
        "rank 0, slot 3: 0B0 needs what is saved by 0F0, which is nowhere",
        "rank 1, slot 1: 1F0 needs the activation of 0F0, which is nowhere",
    ]
    assert verdict(sheet).splitlines()[-1] == "rank 0: missing 0F0"


def test_who_waits_for_a_wrong_cell_is_not_blamed():
    lines = drawn("1f1b", 2, 2)
    lines[1][1], lines[0][1] = "", "1F0"  # on the wrong rank: 1B0, which needs it, is not named too
    assert reasons(lines, 2)[0] == "rank 0, slot 1: 1F0 belongs to rank 1, which holds stage 1"
    assert not any("1B0" in reason.split(" needs ")[0] for reason in reasons(lines, 2))


@pytest.mark.parametrize("seed", range(6))
def test_swapped_cells_are_judged_as_a_second_writing_of_the_rules_does(seed):
    """Cells of 1F1B change places: nothing is said where each action finds what it needs in time, and only there."""
    draw = Random(seed)
    lines = drawn("1f1b", 3, 4)
    for _ in range(60):
        mutant = [list(row) for row in lines]
        rank = draw.randrange(3)
        a, b = draw.sample(range(len(mutant[rank])), 2)
        mutant[rank][a], mutant[rank][b] = mutant[rank][b], mutant[rank][a]
        sheet = sheet_of(mutant, 4)
        slots = {text: slot for row in mutant for slot, text in enumerate(row) if text}
        right = all(
            slots[text] > slots[need]
            for text in slots
            for need in waits_for(text, 3)
        )  # fmt: skip
        assert sheet.is_legal == right
        if sheet.is_legal:
            assert is_legal(sheet.table())
        else:
            assert all(">" in draw_sheet(sheet) for _ in sheet.faults)


def waits_for(text: str, num_ranks: int) -> list[str]:
    """What an action uses, written out once more."""
    stage, op, m = int(text[0]), text[1], text[2]
    if op == "F":
        return [f"{stage - 1}F{m}"] if stage else []
    return [f"{stage}F{m}", *([f"{stage + 1}B{m}"] if stage < num_ranks - 1 else [])]


def save(path, lines, **how):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, **how).writerows(lines)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_empty_sheet_comes_back_filled_from_a_spreadsheet_program(tmp_path, delimiter):
    lines = empty_sheet(4, 8)
    assert [len(line) for line in lines] == [65] * 5
    for rank, row in enumerate(drawn("1f1b", 4, 8)):
        lines[rank + 1][1 : 1 + len(row)] = row
    save(tmp_path / "filled.csv", lines, delimiter=delimiter, lineterminator="\r\n")
    sheet = read_sheet(tmp_path / "filled.csv")
    assert sheet.is_legal
    assert "this is 1F1B, action by action" in verdict(sheet)


def test_an_empty_sheet_misses_everything(tmp_path):
    save(tmp_path / "empty.csv", empty_sheet(2, 3))
    sheet = read_sheet(tmp_path / "empty.csv")
    assert (sheet.faults, len(sheet.missing)) == ([], 12)


def test_one_wrong_number_adds_no_microbatches():
    lines = drawn("1f1b", 2, 3)
    lines[0].append("0F77")
    assert sheet_of(lines).num_microbatches == 3
    assert reasons(lines) == [f"rank 0, slot {len(lines[0]) - 1}: 0F77 has no microbatch: they are 0 to 2"]


def test_a_wide_sheet_is_not_printed_whole():
    lines = [["0F0", *[f"0F{m}" for m in range(3000)]]]
    sheet = sheet_of(lines, 2)
    assert draw_sheet(sheet) == "(too wide to print: 3001 slots)"
    text = verdict(sheet).splitlines()
    assert len(text) == 62
    assert text[60] == f"... and {len(sheet.faults) - 60} more"
    pair = draw_sheet(sheet_of([["(0F0\x1f0B0)OVERLAP_F_B", "0B0"]], 1))
    assert ">(0F0;0B0)...<" in pair


def test_a_file_that_holds_nothing(tmp_path):
    (tmp_path / "no.csv").write_text(",,\n")
    with pytest.raises(UsageError, match=r"'.*no.csv' holds nothing"):
        read_sheet(tmp_path / "no.csv")


def test_the_program_from_the_empty_sheet_to_the_table(tmp_path):
    file, table = tmp_path / "sheet.csv", tmp_path / "table.csv"
    assert python("step6_schedules.worksheet", file, "--empty").status == 0
    again = python("step6_schedules.worksheet", file, "--empty")
    assert (again.status, again.stderr.count("\n")) == (2, 1)
    assert "is there already, and may be filled; name another file" in again.stderr
    lines = list(csv.reader(file.open()))
    for rank, row in enumerate(drawn("1f1b", 4, 8)):
        lines[rank + 1][1 : 1 + len(row)] = row
    lines[2][2] = "1F1"
    save(file, lines)
    wrong = python("step6_schedules.worksheet", file)
    assert wrong.status == 2
    assert "rank 1, slot 1: 1F1 needs the activation of 0F1, which rank 0 runs in the same slot" in wrong.stdout
    assert "has 4 illegal cells and 1 missing action; mend what is named above" in wrong.stderr
    lines[2][2] = "1F0"
    save(file, lines)
    right = python("step6_schedules.worksheet", file, "--table", table)
    assert right.status == 0, right.text
    assert f"--schedule {table} --num-microbatches 8" in right.stdout
    assert read_csv(table).rows == SCHEDULES["1f1b"](4, 8).rows
