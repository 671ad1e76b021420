"""Step 6: the numbers in the lesson pages are those that the code gives."""

import pytest

from step5_orchestrator.costs import costs, read_costs
from step5_orchestrator.prediction import bubble, makespan, peak_in_flight
from step6_schedules.auto import Wanted, find
from step6_schedules.lower_bound import lower_bound
from step6_schedules.schedules import SCHEDULES
from step6_schedules.simulate import Simulation
from tests.ranks import ROOT
from tests.test_step6_auto import OPTIMA_AT_4_8_2

PAGES = {name: (ROOT / "step6_schedules" / name).read_text() for name in ("README.md", "beyond_1f1b.md", "tables.md")}


def rows_of(page, columns):
    """The cells of the page's table rows that have so many columns, by first cell."""
    found = {}
    for line in PAGES[page].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == columns and cells[0] in SCHEDULES:
            found[cells[0]] = cells[1:]
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_each_schedule_buys_and_costs(name):
    row = rows_of("beyond_1f1b.md", 6)[name]
    chunks = SCHEDULES[name].default_chunks
    cost = costs(40 / chunks, 80 / chunks)
    table = SCHEDULES[name].table(4, 8, chunks, cost)
    assert float(row[0]) == makespan(table, cost)
    assert row[1] == f"{bubble(table, cost):.3f}"
    assert float(row[3]) == peak_in_flight(table)[0] / chunks
    assert float(row[2]) >= 1


def test_the_first_pages_table():
    rows = rows_of("README.md", 5)
    assert set(rows) == {"naive", "gpipe", "1f1b"}
    for name, row in rows.items():
        table = SCHEDULES[name](4, 8)
        assert float(row[0].split("=")[1]) == makespan(table)
        assert row[1].split("=")[1].strip() == f"{bubble(table):.3f}"
        assert row[3] == " ".join(map(str, peak_in_flight(table)))


def says(page, text):
    assert text in " ".join(PAGES[page].split()), f"{page} does not say {text!r}"


def test_the_targets_of_the_exercises():
    four = SCHEDULES["interleaved"].table(4, 8, 4)
    assert bubble(four) == pytest.approx(3 / 35)
    says(
        "beyond_1f1b.md", f"rank 0 holds {peak_in_flight(four)[0]} chunks, as much as {peak_in_flight(four)[0] / 4} of"
    )
    cost = read_costs("cost", "F=1,I=2,W=1")
    takes, shortest = (f(SCHEDULES["zb-h1"](4, 8), cost) for f in (makespan, lower_bound))
    says("beyond_1f1b.md", f"takes {takes:g}, and the lower bound is {shortest:g}")
    h2 = SCHEDULES["zb-h2"](4, 8)
    assert makespan(h2, cost) == shortest
    says("beyond_1f1b.md", f"`zb-h2` reaches it, with {max(peak_in_flight(h2))} in flight")
    cost = read_costs("cost", "F=1,B=2,comm=1")
    table = SCHEDULES["1f1b"](4, 8)
    says(
        "tables.md",
        f"Target: {makespan(table, cost):g} instead of 33; the lower bound says {lower_bound(table, cost):g}",
    )
    best = find(Wanted(4, 8, 1, "loop", False, cost))
    assert makespan(best, cost) == lower_bound(table, cost)
    assert lower_bound(SCHEDULES["naive"](2, 3), costs(1, 2), [1, 1]) == makespan(SCHEDULES["naive"](2, 3)) == 18


def test_zb_h2_is_busy_without_a_break():
    cost = costs(40, 80)
    simulation = Simulation(SCHEDULES["zb-h2"](4, 8), cost)
    assert simulation.max_span == 8 * 120
    says("beyond_1f1b.md", "0 for zb-h2 above")


def test_memory_caps_of_the_third_page():
    numbers = [(optimum, peak) for placement, cap, optimum, peak in OPTIMA_AT_4_8_2 if placement == "loop" and cap]
    (slots, first), *others = sorted(numbers)
    says(
        "tables.md", f"{slots} slots with {first} in flight, " + ", ".join(f"{a} with {b}" for a, b in others) + ". No"
    )


def test_three_meanings_of_bubble():
    cost = costs(40, 80)
    for name in ("1f1b", "zb-h2"):
        found = Simulation(SCHEDULES[name](4, 8), cost)
        ours, megatron, paper = found.bubble, found.makespan / 960 - 1, 1 - 960 / found.max_span
        shown = f"{paper:.3f}" if paper else "0"
        says("beyond_1f1b.md", f"{name} {ours:.3f}, {megatron:.3f}, {shown}")


def idle_slots(table, rank):
    times = Simulation(table, costs(1, 1)).times
    return {*range(38)} - {int(times[action][0]) for action in table.rows[rank]}


def test_where_interleaving_waits_and_what_is_found_does_not():
    ours = idle_slots(find(Wanted(4, 8, 2, "loop", False, costs(1, 1))), 0)
    published = idle_slots(SCHEDULES["interleaved"](4, 8), 0)
    assert (ours - published, published - ours) == ({8, 9, 10}, {14, 15, 26})
    says("tables.md", "idle three slots later on instead (14, 15 and 26)")
