"""Step 6: `python -m step6_schedules.table`, a table on paper."""

import json
import re
import shlex
import sys

import pytest

from step0_monolith.options import UsageError
from step5_orchestrator.actions import parse_action
from step5_orchestrator.costs import costs
from step5_orchestrator.legality import check
from step5_orchestrator.prediction import makespan, peak_in_flight
from step5_orchestrator.spreadsheet import read_csv
from step5_orchestrator.table import make_table
from step6_schedules.placement import placement_of, rank_of_stage
from step6_schedules.render import draw_text
from step6_schedules.schedules import SCHEDULES
from step6_schedules.simulate import Simulation
from step6_schedules.table import PaperOptions, main, show
from tests.ranks import python, run_command


def options(schedule, **more):
    return PaperOptions(schedule=schedule, **more)


def shown(capsys, schedule, **more):
    show(options(schedule, **more))
    return capsys.readouterr().out


def test_the_program_prints_the_table_and_its_numbers(tmp_path):
    ran = python("step6_schedules.table", "1f1b", "--csv", tmp_path / "t.csv", "--json", tmp_path / "t.json")
    assert ran.status == 0, ran.text
    assert "makespan 33 (F=1, B=2); lower bound 33: no order of these actions is shorter" in ran.stdout
    assert "bubble 0.273\npeak in flight 4 3 2 1\n" in ran.stdout
    assert read_csv(tmp_path / "t.csv").rows == SCHEDULES["1f1b"](4, 8).rows
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["rows"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert (found["makespan"], found["lower_bound"], found["peak_in_flight"]) == (33, 33, [4, 3, 2, 1])
    assert found["bubble_fraction"] == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_grid_fits_80_columns_and_shows_every_action_where_it_stands(name):
    simulation = Simulation(SCHEDULES[name](4, 8))
    text = draw_text(simulation)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    actions = [action for row in simulation.table.rows for action in row]
    column = max(len(str(a)) + (a in simulation.table.pairs) for a in actions) + 1
    for rank, row in enumerate(simulation.table.rows):
        line = "".join(joined(lines, rank, column))
        cells = re.findall(r"[0-9]+[FBIW][0-9]+", line)
        assert cells == [str(action) for action in row]
        for action in row:
            assert line.index(f"{action}") == simulation.times[action][0] * column


def joined(lines, rank, column):
    """The panels of one rank, one after the other."""
    panels = [line for line in lines if line.startswith(f"rank {rank} ")]
    return [line[8:].ljust(72 // column * column) for line in panels]


def test_costs_that_are_no_whole_numbers_still_print(capsys):
    out = shown(capsys, "1f1b", num_ranks=8, num_microbatches=5, cost="F=18.522,B=27.4,comm=0.6")
    assert "column" in out
    assert max(map(len, out.splitlines())) <= 120
    grid = out.split("\n\n1f1b:")[0]
    for row in SCHEDULES["1f1b"](8, 5).rows:
        assert all(str(action) in grid for action in row)


def test_a_long_table_is_not_printed(capsys):
    assert "too long to print" in shown(capsys, "gpipe", num_ranks=2, num_microbatches=3000)


def test_json_has_plain_numbers_and_no_idle_cells(tmp_path, capsys):
    for name in SCHEDULES:
        path = tmp_path / f"{name}.json"
        shown(capsys, name, num_ranks=3, num_microbatches=6, cost="F=1,B=2,I=1,W=1", json=str(path))
        found = json.loads(path.read_text())
        table = SCHEDULES[name](3, 6)
        assert isinstance(found["makespan"], int)
        assert found["makespan"] == makespan(table, costs(1, 2))
        assert found["peak_in_flight"] == peak_in_flight(table)
        actions = [re.findall(r"[0-9]+[FBIW][0-9]+", " ".join(row)) for row in found["rows"]]
        assert [[parse_action(cell) for cell in row] for row in actions] == [list(row) for row in table.rows]
        assert all(cell for row in found["rows"] for cell in row)


def test_the_picture_is_written(tmp_path, capsys):
    shown(capsys, "gpipe", png=str(tmp_path / "t.png"))
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_a_file_brings_its_own_sizes(tmp_path, capsys):
    path = tmp_path / "drawn.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    assert "drawn.csv: 2 ranks, 1 chunk a rank (loop), 2 microbatches" in shown(capsys, str(path))
    with pytest.raises(UsageError, match="3"):
        shown(capsys, str(path), num_ranks=3)
    with pytest.raises(UsageError, match="--placement v"):
        shown(capsys, str(path), placement="v")
    with pytest.raises(UsageError, match="--num-chunks 2"):
        shown(capsys, str(path), num_chunks=2)


def test_a_refused_file_shows_the_place(tmp_path, capsys, monkeypatch):
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1B0,1F0,1F1,1B1\n")
    monkeypatch.setattr("sys.argv", ["table", str(path)])
    with pytest.raises(UsageError, match="rank 1 cannot run 1B0"):
        main()
    assert ">1B0<" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "more", "message"),
    [
        ("2f2b", {}, "unknown"),
        ("1f1b", {"num_chunks": 2}, "--num-chunks 2: 1f1b has 1 chunk a rank"),
        ("1f1b", {"placement": "v"}, "--placement v: 1f1b has its stages in a loop"),
        ("1f1b", {"split": "yes"}, "--split yes: 1f1b does not split the backward"),
        ("1f1b", {"memory_cap": "3"}, "rank 0 holds 4 chunk activations after 0F3, more than its memory cap of 3"),
        ("1f1b", {"memory_cap": "4,3"}, "--memory-cap has 2 numbers; give one, or one for each of the 4 ranks"),
        ("1f1b", {"memory_cap": "0"}, "--memory-cap must be at least 1"),
        ("1f1b", {"num_ranks": 0}, "--num-ranks must be at least 1"),
        ("1f1b", {"num_microbatches": "x"}, "--num-microbatches must be a whole number"),
        ("gpipe", {"num_ranks": 4000, "num_microbatches": 900_000}, "take fewer"),
        ("nowhere.csv", {}, "nowhere.csv"),
        ("1f1b", {"cost": "F=1"}, "--cost"),
        ("1f1b", {"csv": "table.txt"}, "--csv"),
    ],
)
def test_mistakes_are_one_line(schedule, more, message, capsys):
    with pytest.raises(UsageError) as caught:
        show(options(schedule, **more))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_placements():
    assert [rank_of_stage("loop", 3, s) for s in range(9)] == [0, 1, 2] * 3
    assert [rank_of_stage("v", 3, s) for s in range(9)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    rows = [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    table = make_table("v", [[parse_action(cell) for cell in row] for row in rows])
    check(table)
    assert placement_of(table) == ("v", 2)
    assert placement_of(make_table("one", [table.rows[0][:1] + table.rows[0][-1:]])) == ("loop", 1)


def test_a_table_that_mixes_whole_and_split_backwards_is_not_below_its_bound(tmp_path, capsys):
    path, found = tmp_path / "mixed.csv", tmp_path / "mixed.json"
    path.write_text("0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1\n")
    shown(capsys, str(path), cost="F=1,B=0.1,I=5,W=5", json=str(found))
    numbers = json.loads(found.read_text())
    assert 0 < numbers["lower_bound"] <= numbers["makespan"]


def test_ranks_may_hold_different_numbers_of_chunks(tmp_path, capsys):
    path = tmp_path / "uneven.csv"
    path.write_text("0F0,0B0\n1F0,2F0,2B0,1B0\n")
    out = shown(capsys, str(path), memory_cap="1,2")
    assert "uneven.csv: 2 ranks, different numbers of chunks a rank (other), 1 microbatch\n" in out
    with pytest.raises(UsageError, match="rank 1 holds 2 chunk activations after 2F0"):
        shown(capsys, str(path), memory_cap="1,1")


def test_costs_far_apart_and_costs_too_small(capsys):
    assert "too long to print" in shown(capsys, "zb-h1", cost="F=0.000001,B=80000000")
    with pytest.raises(UsageError, match="at least 1e-06, not 1e-300; choose a smaller unit"):
        shown(capsys, "1f1b", cost="F=1e-300,B=2")
    with pytest.raises(UsageError, match="not below 0"):
        shown(capsys, "1f1b", cost="F=1,B=2,comm=-1")
    with pytest.raises(UsageError, match="must be a number"):
        shown(capsys, "1f1b", cost="F=1_0,B=2")


@pytest.mark.parametrize("name", ["$\\frac{$.csv", "new\nline.csv", "esc\x1b[31m.csv"])
def test_odd_file_names_are_shown_on_one_line_and_drawn(tmp_path, capsys, name):
    path = tmp_path / name
    path.write_text("0F0,0B0\n")
    out = shown(capsys, str(path), png=str(tmp_path / "t.png"))
    assert "\x1b" not in out
    assert "1 rank, 1 chunk a rank (loop), 1 microbatch" in out
    assert (tmp_path / "t.png").stat().st_size > 1000
    path.write_text("0B0,0F0\n")
    with pytest.raises(UsageError) as caught:
        shown(capsys, str(path))
    assert str(caught.value).isprintable()


def test_a_closed_output_is_no_failure(tmp_path):
    command = f"{shlex.quote(sys.executable)} -m step6_schedules.table 1f1b --json {tmp_path / 't.json'} >&-"
    ran = run_command(["bash", "-c", command])
    assert (ran.status, ran.stderr) == (0, "")
    assert json.loads((tmp_path / "t.json").read_text())["makespan"] == 33


def test_limits_count_chunks_and_ops(capsys, tmp_path):
    for schedule in ("zb-v", "auto"):
        with pytest.raises(UsageError, match="6000000 cells, and 2000000 is the most"):
            shown(capsys, schedule, num_ranks=1000, num_microbatches=1000)
    with pytest.raises(UsageError, match="has room for 256 ranks, not 300"):
        shown(capsys, "1f1b", num_ranks=300, num_microbatches=1, png=str(tmp_path / "t.png"))
    path = tmp_path / "one.csv"
    path.write_text("0F0,0B0\n")
    with pytest.raises(UsageError, match="microbatch"):
        shown(capsys, str(path), num_microbatches=2)


def test_rounding_and_pairs_are_explained_below_the_grid(capsys):
    assert "(a column is 1.5; times are rounded to it)" in shown(capsys, "1f1b", cost="F=1.5,B=2.2")
    out = shown(capsys, "dualpipe-v")
    assert "(+ joins a forward and the backward after it in one cell)" in out
    assert "rounded" not in out


@pytest.mark.parametrize(
    ("text", "message", "mark"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1F0\n", "D2 (row 2, column 4) holds 1F0, and so does A2", ">1F0<"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B9\n", "D2 (row 2, column 4) holds 1B9", ">1B9<"),
    ],
)
def test_a_wrong_cell_is_marked_too(tmp_path, capsys, monkeypatch, text, message, mark):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    monkeypatch.setattr("sys.argv", ["table", str(path), "--num-microbatches", "2"])
    with pytest.raises(UsageError) as caught:
        main()
    assert message in str(caught.value)
    assert mark in capsys.readouterr().out
