"""Step 6: the simulator and the lower bound, against times worked out by hand."""

import itertools

import pytest

from step0_monolith.options import UsageError
from step5_orchestrator.actions import Action, is_given, makes, needs, parse_action
from step5_orchestrator.costs import Cost, costs, read_costs
from step5_orchestrator.prediction import bubble, makespan, timing
from step5_orchestrator.table import make_table
from step6_schedules.lower_bound import bound, lower_bound
from step6_schedules.scaling import PHASES, work
from step6_schedules.schedules import SCHEDULES
from step6_schedules.simulate import Simulation


def table_of(*texts):
    return make_table("drawn", [[parse_action(cell) for cell in text.split()] for text in texts])


TWO = table_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_times_by_hand():
    times = timing(TWO, costs(1, 2))
    assert {str(a): t for a, t in times.items()} == {
        "0F0": (0, 1), "0F1": (1, 2), "1F0": (1, 2), "1B0": (2, 4), "0B0": (4, 6), "1F1": (4, 5), "1B1": (5, 7),
        "0B1": (7, 9),
    }  # fmt: skip


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    cost = Cost(comm=0.5, message_bytes=10.0, bandwidth=4.0)
    assert cost.message(1) == 3.0
    times = timing(TWO, cost)
    assert times[Action(1, "F", 0)] == (4.0, 5.0)
    assert times[Action(0, "B", 0)] == (10.0, 12.0)
    assert Cost(message_bytes=(8.0, 4.0), bandwidth=4.0).message(2) == 1.0
    # Two stages on one rank hand over in memory.
    alone = table_of("0F0 1F0 1B0 0B0")
    assert makespan(alone, cost) == 6


def test_a_message_that_does_not_overlap_occupies_its_sender():
    assert timing(TWO, Cost(comm=2.0))[Action(0, "F", 1)] == (1, 2)
    times = timing(TWO, Cost(comm=2.0, overlaps=False))
    assert times[Action(0, "F", 1)] == (3, 4)
    # The gradient of stage 0's input goes nowhere.
    assert times[Action(0, "B", 1)][0] == max(times[Action(0, "B", 0)][1], times[Action(1, "B", 1)][1] + 2)


def test_uneven_stages():
    cost = costs(1, 2).with_stages([1, 3])
    assert timing(TWO, cost)[Action(1, "B", 0)] == (4, 10)
    assert makespan(TWO, cost) == 1 + 9 + 9 + 2
    assert bubble(TWO, cost) == pytest.approx(1 - (6 + 18) / (2 * 21))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("cost", [costs(1, 2), Cost(3.0, 5.0, 2.0, 3.0, comm=0.7), Cost(comm=0.5, overlaps=False)])
def test_the_critical_path_explains_the_makespan(name, cost):
    simulation = Simulation(SCHEDULES[name](4, 8), cost)
    path = simulation.critical_path()
    times, owners = simulation.times, simulation.table.rank_of_stage
    assert times[path[0]][0] == 0
    assert times[path[-1]][1] == simulation.makespan
    for a, b in itertools.pairwise(path):
        is_made_for = set(makes(a)) & set(needs(b))
        assert is_made_for or owners[a.stage] == owners[b.stage]
        gap = times[b][0] - times[a][1]
        crosses = is_made_for and owners[a.stage] != owners[b.stage]
        # Nothing on the path could start sooner: only a message's travel lies between.
        travels = cost.message(1) if crosses or not cost.overlaps else 0.0
        assert -1e-9 <= gap <= travels + 1e-9
    shorter = sum(cost.of(action) for action in path)
    assert shorter <= simulation.makespan + 1e-9


def test_the_longest_span_leaves_the_wait_for_the_first_microbatch_out():
    simulation = Simulation(SCHEDULES["1f1b"](4, 8), costs(1, 1))
    assert simulation.makespan == 22
    assert simulation.max_span == 22
    split = Simulation(SCHEDULES["zb-h2"](2, 4), costs(1, I=1, W=1))
    assert (split.makespan, split.max_span) == (13, 12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_over_time_agrees_with_the_peak_and_comes_to_nothing(name):
    simulation = Simulation(SCHEDULES[name](4, 8))
    sizes = [1.0 + stage for stage in range(simulation.table.num_stages)]
    for curve, weighted, row in zip(simulation.memory(), simulation.memory(sizes), simulation.table.rows, strict=True):
        assert curve[-1][1] == 0
        assert weighted[-1][1] == 0
        assert [moment for moment, _ in curve] == sorted({moment for moment, _ in curve})
        assert min(held for _, held in weighted) == 0
        assert len(row) > 0
    # A backward ends at the moment at which the next forward starts: the row's order frees first, and so does this.
    assert [max(held for _, held in curve) for curve in simulation.memory()] == simulation.peak_in_flight


def test_peak_bytes_by_hand():
    assert Simulation(TWO, costs(1, 2)).peak_bytes([10, 7]) == [20, 7]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (3, 5), (4, 8), (8, 16)])
@pytest.mark.parametrize("cost", [costs(1, 2), costs(1, I=2, W=1), Cost(3.0, 5.0, 2.0, 3.0, comm=0.7)])
def test_no_table_is_below_the_lower_bound(name, p, m, cost):
    try:
        table = SCHEDULES[name](p, m)
    except UsageError:
        return
    assert lower_bound(table, cost) <= makespan(table, cost) + 1e-9


@pytest.mark.parametrize(("p", "v", "m"), [*itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 8, 9))])
def test_the_bound_has_the_published_form(p, v, m):
    owners = [stage % p for stage in range(p * v)]
    for f, i, w in ((1, 1, 1), (1, 2, 1), (3, 2, 2)):
        cost = costs(f, I=i, W=w)
        whole = (f + i + w) * max(m * v + p - 1, p * v + m - 1)
        assert bound(owners, m, cost, splits=False) == whole
        split = max(
            m * v * (f + i + w) + (p - 1) * f, (m * v + p - 1) * (f + i) + w, (p * v + m - 1) * (f + i) + w,
            (p * v - 1) * f + m * (f + i + w),
        )  # fmt: skip
        # Ours also looks at parts of a rank's work, which says more when there are few microbatches.
        assert bound(owners, m, cost, splits=True) == split or (m <= p and v > 1)
        assert bound(owners, m, cost, splits=True) >= split


def test_the_bound_counts_memory():
    # 4 ranks, 8 microbatches, at most 2 in flight: (8+3) + (8/2 - 1) * (4 - 2) = 17 times (F+B).
    assert bound(range(4), 8, costs(1, 2), splits=False, caps=[2] * 4) == 51
    assert bound(range(4), 8, costs(1, 2), splits=False, caps=[4, 3, 2, 1]) == 33


def test_what_is_written_as_costs():
    assert read_costs("--cost", "F=1,B=2,I=1,W=1,comm=0") == Cost(named=("F", "B", "I", "W"))
    assert read_costs("--cost", "F=1,I=2,W=1").B == 3
    given = read_costs("--cost", "F=5, B=10, comm=0.5")
    assert (given.I, given.W, given.comm) == (5, 5, 0.5)
    assert read_costs("--cost", "F=1,B=3,W=1").I == 1.5
    assert read_costs("--cost", "F=1,I=1,W=1").names_split
    assert not read_costs("--cost", "F=1,B=2,I=1,W=1").names_split
    assert given.text("FB") == "F=5, B=10, comm=0.5"


@pytest.mark.parametrize(
    "text",
    ["B=2", "F=1", "F=1,I=1", "F=1,W=1", "F=1,B=2,F=1", "F=0,B=1", "F=1,B=2,comm=-1", "F=1,B=nan", "", "f=1"],
)
def test_costs_that_are_refused(text):
    with pytest.raises(UsageError, match="--cost") as caught:
        read_costs("--cost", text)
    assert "\n" not in str(caught.value)


def test_the_scaling_program_measures_every_phase():
    laps = []
    table = work("1f1b", 3, 4, laps.append)
    assert tuple(laps) == PHASES
    assert table == SCHEDULES["1f1b"](3, 4)


def test_a_table_of_many_actions_is_worked_through_once():
    """Each action's needs are looked at a fixed number of times, however large the table: the work is linear."""
    counts = []
    for m in (50, 100, 200):
        table = SCHEDULES["1f1b"](8, m)
        order = table.order
        assert len(order) == 16 * m
        seen = sum(1 for a in order for v in needs(a) if not is_given(v, table.num_stages))
        counts.append(seen / len(order))
    assert max(counts) - min(counts) < 0.02
