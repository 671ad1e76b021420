"""Tables in CSV files: what is written, every quirk that is read, and every refusal with its place and text."""

import csv
import os
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from step0_monolith.options import RunError, UsageError
from step5_orchestrator import csv_file, spreadsheet
from step5_orchestrator.actions import OPS, Action
from step5_orchestrator.cells import Place
from step5_orchestrator.legality import check
from step5_orchestrator.spreadsheet import read_csv, write_csv
from step5_orchestrator.table import make_table
from step6_schedules.gpipe import gpipe
from step6_schedules.one_f_one_b import one_f_one_b
from step6_schedules.schedules import SCHEDULES

TWO = "0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n"
TWO_ROWS = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
PAIR = "(0F1;0B0)OVERLAP_F_B"
PAIRED = f"0F0,,{PAIR},0B1\n"


def texts(table):
    return tuple(tuple(map(str, row)) for row in table.rows)


@pytest.fixture
def file(tmp_path):
    """Writes a file `t.csv` and returns its path."""

    def write(content, encoding="utf-8"):
        path = tmp_path / "t.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
        return path

    return write


# Writing


def test_a_cell_lies_in_the_column_of_its_time(tmp_path):
    write_csv(one_f_one_b(3, 3), tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_bytes() == (
        b"0F0,0F1,0F2,,,0B0,,0B1,,0B2\r\n"
        b",1F0,1F1,,1B0,1F2,1B1,,1B2\r\n"
        b",,2F0,2B0,2F1,2B1,2F2,2B2\r\n"
    )  # fmt: skip


def test_a_pair_is_one_cell_and_starts_when_both_can(tmp_path):
    rows = [[(0, "F", 0), (0, "F", 1), (0, "B", 0), (0, "B", 1)], [(1, "F", 0), (1, "B", 0), (1, "F", 1), (1, "B", 1)]]
    table = make_table("t", [[Action(*cell) for cell in row] for row in rows], [Action(0, "F", 1)])
    write_csv(table, tmp_path / "t.csv")
    # Alone 0F1 could start in column 2; with 0B0 it waits for 1B0.
    assert (tmp_path / "t.csv").read_text().splitlines() == [f"0F0,,,{PAIR},,,0B1", ",1F0,1B0,,1F1,1B1"]
    again = read_csv(tmp_path / "t.csv")
    assert (again.rows, again.pairs) == (table.rows, table.pairs)


def test_a_pair_may_be_a_microbatch_there_and_back(tmp_path):
    pair = [Action(1, "F", 0), Action(1, "B", 0)]
    write_csv(make_table("t", [[Action(0, "F", 0), Action(0, "B", 0)], pair], pair[:1]), tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().splitlines() == ["0F0,,0B0", ",(1F0;1B0)OVERLAP_F_B"]


def test_rows_that_need_too_many_columns_are_written_without_blanks(tmp_path, monkeypatch):
    assert spreadsheet.MAX_COLUMNS == 16_384
    table = one_f_one_b(3, 3)
    for limit, has_blanks in ((10, True), (9, False)):
        monkeypatch.setattr(spreadsheet, "MAX_COLUMNS", limit)
        write_csv(table, tmp_path / "t.csv")
        assert max(len(row) for row in csv.reader((tmp_path / "t.csv").open())) == (10 if has_blanks else 6)
        assert read_csv(tmp_path / "t.csv").rows == table.rows


def test_rows_that_cannot_run_are_written_without_blanks(tmp_path):
    stuck = make_table("stuck", [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]])
    # Both pairs run in sequence, but neither could start as one.
    pairs = [Action(0, "F", 1), Action(1, "F", 1)]
    crossed = [
        [Action(0, "F", 0), pairs[0], Action(0, "B", 0), Action(0, "B", 1)],
        [Action(1, "F", 0), pairs[1], Action(1, "B", 0), Action(1, "B", 1)],
    ]
    for table in (stuck, make_table("crossed", crossed, pairs)):
        write_csv(table, tmp_path / "t.csv")
        assert ",," not in (tmp_path / "t.csv").read_text()
        again = read_csv(tmp_path / "t.csv")
        assert (again.rows, again.pairs) == (table.rows, table.pairs)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_schedule_returns_unchanged(tmp_path, num_ranks):
    for schedule in SCHEDULES.values():
        table = schedule(num_ranks, 12)
        write_csv(table, tmp_path / f"{table.name}.csv")
        again = read_csv(tmp_path / f"{table.name}.csv", num_ranks, 12)
        assert (again.rows, again.pairs) == (table.rows, table.pairs), table.name
        assert again.name == f"{table.name}.csv"


def test_a_disk_that_refuses_leaves_the_older_file(tmp_path):
    path = tmp_path / "t.csv"
    write_csv(gpipe(2, 2), path)
    before = path.read_bytes()
    with pytest.raises(RunError, match="could not be written"):
        write_csv(gpipe(2, 2), path / "t.csv")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["t.csv"]


# What spreadsheet programs write

QUIRKS = {
    "as it is": TWO,
    "no blanks": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "no line end at the end": TWO.rstrip(),
    "LF": TWO.replace("\r\n", "\n"),
    "CR": TWO.replace("\r\n", "\r"),
    "semicolons": TWO.replace(",", ";"),
    "tabs": TWO.replace(",", "\t"),
    "spaces": TWO.replace(",", " , "),
    "spaces after semicolons": TWO.replace(",", "; "),
    "hard spaces": TWO.replace(",", "\xa0,\xa0"),
    "aligned with tabs": TWO.replace(",", ",\t"),
    "quoted": '"0F0","0F1","","",0B0,"",0B1\n"","1F0","1B0",1F1,"1B1"\n',
    "quoted with spaces": '"0F0" , "0F1 "," 0B0",0B1\n1F0,1B0,"1F1\n", "1B1" \n',
    "trailing blank cells": "0F0,0F1,0B0,0B1,,,\n1F0,1B0,1F1,1B1,,, \n",
    "trailing blank lines": TWO + "\r\n,,,,\r\n \r\n\r\n",
    "leading zeros": "00F0,0F01,0B0,0B1\n1F0,1B0,1F1,1B1\n",
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("quirk", QUIRKS)
def test_what_spreadsheet_programs_write_is_read(file, quirk, encoding):
    table = read_csv(file(QUIRKS[quirk], encoding), 2, 2)
    assert texts(table) == TWO_ROWS
    assert table.pairs == frozenset()
    assert table.name == "t.csv"
    check(table)


def test_utf_16_of_either_byte_order_with_a_mark(file):
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        assert texts(read_csv(file(mark + TWO.replace(",", "\t").encode(encoding)))) == TWO_ROWS


PAIRED_QUIRKS = {
    "commas": PAIRED,
    "semicolons, quoted": PAIRED.replace(",", ";").replace(PAIR, f'"{PAIR}"'),
    "semicolons, bare": PAIRED.replace(",", ";"),
    "tabs": PAIRED.replace(",", "\t"),
    "spaces inside": PAIRED.replace(PAIR, "( 0F1 ; 0B0 ) OVERLAP_F_B"),
    "more semicolons than commas": f"0F0,{PAIR}\n".replace(PAIR, f"{PAIR},(0F2;0B1)OVERLAP_F_B,0B2"),
}


@pytest.mark.parametrize("quirk", PAIRED_QUIRKS)
def test_pairs_are_read(file, quirk):
    table = read_csv(file(PAIRED_QUIRKS[quirk]))
    assert texts(table)[0][:3] == ("0F0", "0F1", "0B0")
    assert Action(0, "F", 1) in table.pairs
    assert len(table.pairs) == PAIRED_QUIRKS[quirk].count("OVERLAP")
    check(table)


def test_a_pair_may_split_the_backward(file):
    table = read_csv(file("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n"))
    assert texts(table) == (("0F0", "0F1", "0I0", "0W0", "0B1"),)
    check(table)


def test_a_path_may_be_a_string(file):
    assert texts(read_csv(str(file(TWO)))) == TWO_ROWS


# What is refused

REFUSED = {
    # name: (content, the message after the path)
    "junk behind": ("0F0,0B0\n1F0,1B0x\n", "B2 (row 2, column 2) holds '1B0x': this is no action; write stage, op "
        "(F, B, I or W) and microbatch, such as 2F0, or leave the cell blank"),
    "a word": ("rank 0,0F0\n", "A1 (row 1, column 1) holds 'rank 0': this is no action"),
    "a sign": ("0F0,-1F0\n", "B1 (row 1, column 2) holds '-1F0': this is no action"),
    "a fraction": ("0F0,0B0.0\n", "B1 (row 1, column 2) holds '0B0.0': this is no action"),
    "digits of another script": ("0F0,0F\u0661\n", "B1 (row 1, column 2) holds '0F\u0661': this is no action"),
    "a formula": ('"=""0F0""",0B0\n', "A1 (row 1, column 1) holds '=\"0F0\"': this is no action"),
    "a line end inside": ('0F0,"0B0\n0F1"\n', "B1 (row 1, column 2) holds '0B0\\n0F1': a cell is one action"),
    "no microbatch": ("0F0,0B\n", "B1 (row 1, column 2) holds '0B': the microbatch is missing; write it last, as in "
        "0B0"),
    "no stage": ("F0,0B0\n", "A1 (row 1, column 1) holds 'F0': the stage is missing; write it first, as in 0F0"),
    "two actions": ("0F0 0B0\n", "A1 (row 1, column 1) holds '0F0 0B0': a cell is one action, or a pair such as "
        "(2F4;5B1)OVERLAP_F_B; give each action a cell of its own"),
    "two microbatches": ("0F0,0F1,0B0B1\n", "C1 (row 1, column 3) holds '0B0B1': this is no action"),
    "small letters": ("0f0,0B0\n", "A1 (row 1, column 1) holds '0f0': ops are capital letters; write 0F0"),
    "an unknown op": ("0F0,0X0\n", "B1 (row 1, column 2) holds '0X0': the op 'X' is unknown; write one of F, B, I "
        "and W"),
    "a send": ("0F0,0SEND_F0\n", "B1 (row 1, column 2) holds '0SEND_F0': SEND_F is communication, which lowering adds; "
        "export the compute-only table, or leave the cell blank"),
    "a reduction": ("0F0,0B0,0REDUCE_GRAD\n", "C1 (row 1, column 3) holds '0REDUCE_GRAD': REDUCE_GRAD is "
        "communication"),
    "an unshard": ("0UNSHARD,0F0,0B0\n", "A1 (row 1, column 1) holds '0UNSHARD': UNSHARD is communication"),
    "a pair that is open": ("0F0,(0F1;0B0\n", "B1 (row 1, column 2) holds '(0F1;0B0': a pair is two actions, written "
        "as (2F4;5B1)OVERLAP_F_B"),
    "a pair of one": ("0F0,(0F1)OVERLAP_F_B\n", "B1 (row 1, column 2) holds '(0F1)OVERLAP_F_B': a pair is two actions"),
    "a pair of three": ("(0F1;0B0;0F2)OVERLAP_F_B\n", "A1 (row 1, column 1) holds '(0F1;0B0;0F2)OVERLAP_F_B': a pair "
        "is two actions"),
    "a pair of another name": ("(0F1;0B0)OVERLAP\n", "A1 (row 1, column 1) holds '(0F1;0B0)OVERLAP': a pair is"),
    "a pair of two forwards": ("(0F1;1F0)OVERLAP_F_B\n", "A1 (row 1, column 1) holds '(0F1;1F0)OVERLAP_F_B': a pair is "
        "a forward and then a backward (B or I)"),
    "a pair of two backwards": ("(0B1;1B0)OVERLAP_F_B\n", "A1 (row 1, column 1) holds '(0B1;1B0)OVERLAP_F_B': a pair "
        "is a forward and then a backward (B or I)"),
    "a pair with junk": ("(0F1;0B)OVERLAP_F_B\n", "A1 (row 1, column 1) holds '(0F1;0B)OVERLAP_F_B': in the pair, "
        "'0B': the microbatch is missing; write it last, as in 0B0"),
    "a number of ten digits": ("0F0,0B1234567890\n", "B1 (row 1, column 2) holds '0B1234567890': no stage or "
        "microbatch has more than 9 digits"),
    "an endless number": ("0F0,0B" + 100_000 * "1" + "\n", "B1 (row 1, column 2) holds '0B" + 35 * "1" + "...': no "
        "stage"),
    "twice in a row": ("0F0,0B0,,0F0\n", "D1 (row 1, column 4) holds 0F0, and so does A1: every action runs once; "
        "correct one of them, or delete it"),
    "twice on two ranks": ("0F0,0B0\n1F0,1B0,0B0\n", "C2 (row 2, column 3) holds 0B0, and so does B1"),
    "twice, in a pair": ("0F0,0F1,(0F1;0B0)OVERLAP_F_B\n", "C1 (row 1, column 3) holds 0F1, and so does B1"),
    "twice in one cell": ("0F0,(0F0;0B0)OVERLAP_F_B\n", "B1 (row 1, column 2) holds 0F0, and so does A1"),
    "an absurd stage": ("0F0,0B0\n900000F0,1B0\n", "A2 (row 2, column 1) holds 900000F0, but stages 0..900000 with "
        "microbatches 0..0 take at least 1800002 actions, and the table has 4; correct the number, or add what is "
        "missing"),
    "an absurd microbatch": ("0F0,0B0\n1F0,1B999999999\n", "B2 (row 2, column 2) holds 1B999999999, but stages 0..1 "
        "with microbatches 0..999999999 take at least 4000000000 actions"),
    "a digit too many": ("0F0,0F1,0B0,0B1\n1F0,1F11,1B0,1B1\n", "B2 (row 2, column 2) holds 1F11, but stages 0..1 with "
        "microbatches 0..11 take at least 48 actions, and the table has 8"),
    "a blank row in the middle": ("0F0,0B0\n,,\n2F0,2B0\n", "row 2 has no action in any column, and it is rank 1's; "
        "fill it, or delete the line"),
    "a blank first row": ("\n0F0,0B0\n", "row 1 has no action in any column, and it is rank 0's"),
    "nothing": ("", " holds no action; write a line for each rank, with cells such as 2F0"),
    "blanks only": ("\ufeff,,\n,,\n", " holds no action; write a line for each rank"),
    "a workbook": (b"PK\x03\x04\x14\x00\x06", " is a workbook, not CSV; save the sheet as CSV in the spreadsheet "
        "program"),
    "an old workbook": (b"\xd0\xcf\x11\xe0\xa1\xb1", " is a workbook, not CSV"),
    "a picture": (b"\x89PNG\r\n\x1a\n\x00", " is no text in UTF-8 or UTF-16; save the table as CSV"),
    "zeros": (b"0F0,0B0" + bytes(50), " is no text in UTF-8 or UTF-16"),
    "half a character": (b"\xff\xfe0\x00F", " is no text in UTF-8 or UTF-16"),
    "a quote without an end": ('0F0,"0B0\n' + 50_000 * "1F0,1B0\n", " row 1 has a cell that is longer than any action; "
        "look for a quote without an end"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_place_and_what_to_do(file, name):
    content, message = REFUSED[name]
    path = file(content)
    with pytest.raises(UsageError) as caught:
        read_csv(path)
    said = str(caught.value)
    assert said.removeprefix(repr(str(path))).removeprefix(":").strip().startswith(message.strip()), said
    assert said.startswith(repr(str(path)))
    assert "\n" not in said
    assert len(said) < 400


def test_columns_beyond_z_have_two_letters(file):
    assert [Place(0, column).name for column in (0, 25, 26, 51, 52, 701, 702, 16_383)] == [
        "A1", "Z1", "AA1", "AZ1", "BA1", "ZZ1", "AAA1", "XFD1",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"AB2 \(row 2, column 28\) holds 'x'"):
        read_csv(file("0F0,0B0\n" + 27 * "," + "x\n"))


def test_another_number_of_ranks_or_microbatches_is_refused(file):
    three = file("0F0,0B0\n1F0,1B0\n2F0,2B0\n")
    with pytest.raises(UsageError, match="has 3 rows, but 4 ranks run: a table has a row for each rank; run it with 3"):
        read_csv(three, 4)
    with pytest.raises(UsageError, match="has 1 row, but 2 ranks run"):
        read_csv(file("0F0,0B0\n,,\n\n"), 2)
    with pytest.raises(UsageError, match=r"B1 \(row 1, column 2\) holds 0F1, but microbatches are 0..0; correct the "
                                         "cell, or run the table with 2 microbatches"):  # fmt: skip
        read_csv(file(TWO), 2, 1)
    assert texts(read_csv(file(TWO), 2, 3)) == TWO_ROWS  # which are missing is for the check of completeness to say


def test_paths_that_are_no_readable_file_are_refused(tmp_path, file, monkeypatch):
    with pytest.raises(UsageError, match=r"missing\.csv' cannot be read \(No such file or directory\); name a CSV"):
        read_csv(tmp_path / "missing.csv")
    with pytest.raises(UsageError, match="is a directory; name a CSV file in it"):
        read_csv(tmp_path)
    with pytest.raises(UsageError, match=r"cannot be read \(File name too long\)"):
        read_csv(tmp_path / (300 * "x" + ".csv"))
    with pytest.raises(UsageError, match=r"cannot be read \(Not a directory\)"):
        read_csv(file(TWO) / "t.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(UsageError, match="is not an ordinary file"):
        read_csv(tmp_path / "pipe.csv")
    monkeypatch.setattr(csv_file, "MAX_BYTES", len(TWO))
    assert texts(read_csv(file(TWO))) == TWO_ROWS
    with pytest.raises(UsageError, match="is larger than 0 MiB; name a CSV file that holds one table"):
        read_csv(file(TWO + "\n"))


# Any table, any dress


@st.composite
def tables(draw):
    """Rows of different actions, in any order, with some forwards paired with the backward behind them."""
    num_stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    every = [Action(stage, op, m) for stage in range(num_stages) for op in OPS for m in range(count)]
    order = draw(st.permutations(every))
    cuts = sorted(draw(st.sets(st.integers(1, len(every) - 1), max_size=3)))
    rows = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(every)], strict=True)]
    able = [a for row in rows for a, b in pairwise(row) if a.op == "F" and b.op in ("B", "I")]
    pairs = draw(st.sets(st.sampled_from(able))) if able else set()
    return make_table("t.csv", rows, pairs)


calmly = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@calmly
@given(table=tables(), data=st.data())
def test_any_table_returns_unchanged_whatever_a_spreadsheet_program_does_to_it(tmp_path, table, data):
    path = tmp_path / "t.csv"
    write_csv(table, path)
    again = read_csv(path)
    assert (again.name, again.rows, again.pairs) == (table.name, table.rows, table.pairs)
    separator, line_end = data.draw(st.sampled_from(",;\t")), data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    encoding = data.draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
    lines = []
    for rank in range(table.num_ranks):
        cells = []
        for cell in table.cells(rank):
            cells += data.draw(st.sampled_from([[], [""], [" ", '""']]))
            cells.append(data.draw(st.sampled_from([cell, f'"{cell}"', f" {cell}  "])))
        lines.append(separator.join(cells + data.draw(st.sampled_from([[], ["", ""]]))))
    path.write_bytes((line_end.join(lines) + data.draw(st.sampled_from(["", line_end]))).encode(encoding))
    again = read_csv(path)
    assert (again.rows, again.pairs) == (table.rows, table.pairs)


@calmly
@given(content=st.one_of(st.binary(max_size=60), st.text("0123FBIW;,()\"' \t\r\n\0OVERLAP_", max_size=60)))
def test_whatever_a_file_holds_ends_in_a_table_or_one_line(tmp_path, content):
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        table = read_csv(path)
    except UsageError as error:
        said = str(error)
    else:
        said = str(len(table.rows)) * all(table.rows)
    assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_a_large_table_returns_unchanged(tmp_path):
    table = one_f_one_b(64, 2048)
    assert sum(map(len, table.rows)) == 262_144
    write_csv(table, tmp_path / "t.csv")
    assert read_csv(tmp_path / "t.csv", 64, 2048).rows == table.rows
