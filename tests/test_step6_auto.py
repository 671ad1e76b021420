"""Step 6: the search behind `auto`, against proved optima and published schedules."""

import itertools
import json
import sys

import pytest

from step0_monolith.options import UsageError
from step5_orchestrator.actions import Action
from step5_orchestrator.choose import Choice
from step5_orchestrator.costs import Cost, costs, read_costs
from step5_orchestrator.legality import check
from step5_orchestrator.prediction import makespan, peak_in_flight
from step5_orchestrator.table import make_table
from step6_schedules.auto import Wanted, compare, find, published
from step6_schedules.choose import ScheduleOptions, choose
from step6_schedules.lower_bound import lower_bound
from step6_schedules.placement import placement_of
from step6_schedules.search.problem import Problem
from step6_schedules.search.solver import solve
from step6_schedules.search.timing import times
from tests.all_cores import on_all_cores
from tests.monolith import small
from tests.ranks import ROOT, python, run_command, torchrun
from tests.training import Job, assert_equals_monolith, train_jobs

OPTIMA = json.loads((ROOT / "tests" / "data" / "optimal_makespans.json").read_text())["rows"]
PUBLISHED = json.loads((ROOT / "tests" / "data" / "schedules.json").read_text())["rows"]


def wanted_of(row, caps=None):
    """The search for the sizes of a row of the published numbers."""
    placement = row.get("placement") or ("v" if row["schedule"] in ("zb-v", "dualpipe-v") else "loop")
    cost = read_costs("cost", row["cost"])
    cap = row.get("memory_cap", caps)
    caps = [cap] * row["num_ranks"] if isinstance(cap, int) else cap
    sizes = (row["num_ranks"], row["num_microbatches"], row["num_chunks"])
    return Wanted(*sizes, placement, cost.names_split, cost, caps)


def checked(wanted):
    """The table that is found; legal, in order, and within the caps."""
    table = find(wanted)
    check(table, wanted.caps)
    assert table.unordered_stages == ()
    assert table.ops == (("F", "I", "W") if wanted.splits else ("F", "B"))
    assert (table.num_ranks, table.num_microbatches) == (wanted.num_ranks, wanted.num_microbatches)
    assert table.num_stages == wanted.num_ranks * wanted.num_chunks
    assert placement_of(table)[0] == wanted.placement or 1 in (wanted.num_chunks, wanted.num_ranks)
    return table


def short_of_the_optimum(rows):
    """The rows for which less than the proved optimum was found, with what was found; none may be below it."""
    missed = []
    for row in rows:
        wanted, optimum = wanted_of(row), row["optimal_makespan"]
        table = checked(wanted)
        found = makespan(table, wanted.cost)
        assert found >= optimum, f"shorter than what was proved: {row}"
        assert lower_bound(table, wanted.cost, wanted.caps) <= optimum, f"the bound is wrong: {row}"
        assert found <= max(optimum + 1, 1.03 * optimum), f"{found}: {row}"
        if found > optimum:
            missed.append((found, row))
    return missed


def test_some_proved_optima_are_found():
    picked = [row for row in OPTIMA if row["num_ranks"] * row["num_microbatches"] <= 8][::3] + OPTIMA[100::60]
    assert len(picked) >= 20
    assert {row["placement"] for row in picked} == {"loop", "v"}
    assert short_of_the_optimum(picked) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_at_least_95_percent_of_the_proved_optima_are_found():
    assert len(OPTIMA) == 302
    missed = on_all_cores(short_of_the_optimum, OPTIMA)
    assert len(missed) <= 0.05 * len(OPTIMA), missed


def slower_than_published(rows):
    """The searches whose table is slower than a row of that size, cost and memory: its peaks, and its largest peak."""
    return slower_than(list(fastest_published(rows).items()))


def fastest_published(rows):
    """For each search the shortest makespan that was published for what it may use."""
    fastest = {}
    for row in rows:
        for caps in (tuple(row["peak_in_flight"]), (max(row["peak_in_flight"]),) * row["num_ranks"]):
            wanted = wanted_of(row, caps)
            fastest[wanted] = min(row["makespan"], fastest.get(wanted, row["makespan"]))
    return fastest


def slower_than(searches):
    """The searches, given with the makespan to reach, that find a longer one."""
    found = [(wanted, makespan(checked(wanted), wanted.cost), least) for wanted, least in searches]
    return [(wanted, length) for wanted, length, least in found if length > least]


def test_not_slower_than_published_schedules_at_the_same_memory():
    assert slower_than_published(PUBLISHED[::37]) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_never_slower_than_any_published_schedule_at_the_same_memory():
    searches = list(fastest_published(PUBLISHED).items())
    assert len(searches) == 356
    assert on_all_cores(slower_than, searches) == []


def test_never_slower_than_our_own_schedules_even_with_odd_costs():
    cost = Cost(F=3.0, B=7.0, I=4.5, W=2.5, comm=0.7, named=("F", "I", "W")).with_stages([1, 2, 1, 0.5, 1, 1])
    for placement, splits in (("loop", False), ("v", True)):
        for cap in (None, 5):
            wanted = Wanted(3, 5, 2, placement, splits, cost, cap and [cap] * 3)
            found = makespan(checked(wanted), cost)
            for each in published(wanted):
                if cap is None or max(each.peaks) <= cap:
                    assert found <= each.makespan + 1e-9, each.table.name


# Proved: the shortest with 4 ranks, two chunks each, 8 microbatches, F=B=1, and that memory.
OPTIMA_AT_4_8_2 = [
    ("loop", None, 38, 8), ("loop", 7, 40, 7), ("loop", 6, 42, 6), ("loop", 5, 48, 5), ("loop", 4, 54, 4),
    ("v", 7, 40, 7), ("v", 6, 42, 6), ("v", 5, 46, 5), ("v", 4, 50, 4),
]  # fmt: skip
SLOW_ONES = [("v", 7), ("v", 6), ("v", 5), ("loop", 7), ("loop", 4)]


@pytest.mark.parametrize(
    ("placement", "cap", "optimum", "peak"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row[:2] in SLOW_ONES)) for row in OPTIMA_AT_4_8_2],
)
def test_the_lessons_numbers(placement, cap, optimum, peak):
    wanted = Wanted(4, 8, 2, placement, False, costs(1, 1), cap and [cap] * 4)
    table = checked(wanted)
    assert (makespan(table, wanted.cost), max(peak_in_flight(table))) == (optimum, peak)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (Wanted(4, 8, 1, "loop", False, costs(1, 2)), "auto: same as 1f1b: 33 with 4 in flight"),
        (
            Wanted(4, 8, 2, "loop", False, costs(1, 1)),
            "auto: beats interleaved: 38 with 8 in flight instead of 11",
        ),
        (
            Wanted(4, 8, 1, "loop", False, costs(1, 2), [2] * 4),
            "auto: beats naive: 51 with 2 in flight instead of 96 with 1; 1f1b takes 33 with 4, beyond the memory cap",
        ),
        (
            Wanted(4, 8, 2, "v", False, costs(1, 2)),
            "auto: 57 with 11 in flight; no published schedule has these chunks and this placement",
        ),
        (
            Wanted(4, 8, 1, "loop", True, costs(1, I=2, W=1), [5] * 4),
            "auto: beats zb-h1: 37 with 5 in flight instead of 38 with 4; zb-h2 takes 35 with 7, beyond the memory cap",
        ),
        (Wanted(4, 2, 2, "v", True, costs(1, I=1, W=1)), "auto: same as zb-v: 19 with 4 in flight"),
    ],
)
def test_it_says_what_it_found(wanted, sentence):
    assert compare(wanted, find(wanted)) == sentence


def test_a_shorter_one_than_published_is_said_to_beat_it():
    wanted = Wanted(4, 8, 2, "v", True, costs(1, I=2, W=1))
    best = min(each.makespan for each in published(wanted))
    table = checked(wanted)
    assert makespan(table, wanted.cost) < best
    assert compare(wanted, table).startswith(f"auto: beats zb-v: {makespan(table, wanted.cost):g} with ")


def test_caps_without_a_table_are_refused():
    with pytest.raises(UsageError, match="rank 2 holds its 2 chunks of one microbatch at the same time"):
        choose(ScheduleOptions(schedule="auto", num_chunks=2, memory_cap="4,4,1,4"), 4, 8)
    with pytest.raises(ValueError, match="room for its"):
        Problem([0, 1, 0, 1], 3, costs(1, 2), False, [2, 1])


@pytest.mark.parametrize(
    ("flags", "chunks", "placement", "ops"),
    [
        ({}, 1, "loop", "FB"),
        ({"placement": "v"}, 2, "v", "FB"),
        ({"num_chunks": 3}, 3, "loop", "FB"),
        ({"cost": "F=1,I=1,W=1"}, 1, "loop", "FIW"),
        ({"cost": "F=1,B=2,I=1,W=1"}, 1, "loop", "FB"),
        ({"split": "yes"}, 1, "loop", "FIW"),
        ({"cost": "F=1,I=1,W=1", "split": "no"}, 1, "loop", "FB"),
    ],
)
def test_flags_say_what_is_searched(flags, chunks, placement, ops):
    choice = choose(ScheduleOptions(schedule="auto", **flags), 3, 4)
    assert choice.is_searched
    table = choice.make()
    assert "".join(table.ops) == ops
    assert placement_of(table) == (placement, chunks)
    assert choice.num_stages == table.num_stages


@pytest.mark.parametrize(("p", "m", "v"), [(1, 1, 1), (1, 5, 3), (5, 1, 2), (7, 3, 1), (2, 4, 3)])
def test_odd_sizes(p, m, v):
    for placement, splits in itertools.product(("loop", "v"), (False, True)):
        checked(Wanted(p, m, v, placement, splits, costs(1, I=1, W=1)))
        checked(Wanted(p, m, v, placement, splits, costs(1, I=1, W=1), [v] * p))


def test_all_orders_of_a_tiny_case_are_no_shorter():
    """Every pair of rows for 2 ranks and 2 microbatches, tried one by one."""
    cost, best = Cost(F=2.0, B=3.0, comm=1.0), {}
    for splits, caps in itertools.product((False, True), (None, [1, 1], [2, 1])):
        ops = "FIW" if splits else "FB"
        rows = [
            [row for row in itertools.permutations([(s, op, m) for op in ops for m in (0, 1)]) if in_order(row)]
            for s in (0, 1)
        ]
        problem = Problem([0, 1], 2, cost, splits, caps)
        shortest = float("inf")
        for pair in itertools.product(*rows):
            table = make_table("tried", [[Action(*a) for a in row] for row in pair])
            try:
                check(table, caps)
            except UsageError:
                continue
            shortest = min(shortest, makespan(table, cost))
        best[splits, str(caps)] = shortest
        assert solve(problem).makespan == shortest
    assert len(set(best.values())) > 2


def in_order(row):
    place = {action: index for index, action in enumerate(row)}
    return all(
        (place[s, a, m] < place[s, b, m])
        for s, a, m in row
        for b in ("B", "I", "W")
        if (s, b, m) in place and "FIBW".index(a) < "FIBW".index(b)
    ) and all(place[s, op, 0] < place[s, op, 1] for s, op, m in row if m == 1)


def test_the_search_times_tables_as_the_simulator_does():
    cost = Cost(F=3.0, B=7.0, I=4.5, W=2.5, comm=0.7).with_stages([1, 2, 1, 0.5, 1, 1])
    for splits in (False, True):
        wanted = Wanted(3, 5, 2, "loop", splits, cost)
        problem = wanted.problem()
        found = solve(problem, budget=1)
        makespan_here, _, peaks = times(problem, found.rows)
        rows = [[Action(x % 6, problem.ops[x // 6], m) for x, m in row] for row in found.rows]
        table = make_table("found", rows)
        assert makespan(table, cost) == pytest.approx(makespan_here)
        assert peak_in_flight(table) == peaks


def test_it_is_deterministic():
    code = (
        "from step6_schedules.auto import Wanted, find; from step5_orchestrator.costs import costs; "
        "print(find(Wanted(3, 4, 2, 'v', True, costs(1, I=2, W=1), [3] * 3)))"
    )
    ran = run_command([sys.executable, "-c", code], environment={"PYTHONHASHSEED": "1"})
    assert ran.status == 0, ran.text
    assert ran.stdout == f"{find(Wanted(3, 4, 2, 'v', True, costs(1, I=2, W=1), [3] * 3))}\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("splits", [False, True])
def test_a_huge_table_is_found_with_bounded_effort(splits):
    wanted = Wanted(64, 512, 2, "loop", splits, costs(1, I=1, W=1))
    table = checked(wanted)
    assert makespan(table, wanted.cost) == lower_bound(table, wanted.cost)


def agree(world, options, num_microbatches):
    """The table that this rank gets, and whether it searched for it itself."""
    choice = choose(options, world.size, num_microbatches)
    searched = []
    watched = Choice(choice.num_stages, lambda: searched.append(1) or choice.make(), choice.is_searched)
    return watched.table(world).rows, bool(searched)


def test_rank_0_searches_and_sends_the_table_to_all(pool):
    options = ScheduleOptions(schedule="auto", num_chunks=2, memory_cap="5")
    results = pool.run(3, agree, options, 4)
    assert [searched for _, searched in results] == [True, False, False]
    assert {rows for rows, _ in results} == {choose(options, 3, 4).make().rows}


FOUND = [(1, "loop", True, 2), (2, "loop", False, None), (2, "v", True, 3)]


def jobs_for(num_ranks, ms, changes=()):
    return [
        Job(
            small(num_microbatches=m, num_layers=max(9, chunks * num_ranks), **dict(changes)),
            find(Wanted(num_ranks, m, chunks, placement, splits, costs(1, I=1, W=1), cap and [cap] * num_ranks)),
        )
        for chunks, placement, splits, cap in FOUND
        for m in ms
    ]


@pytest.mark.parametrize("num_ranks", [3])
def test_what_is_found_trains_with_the_monoliths_bits(pool, num_ranks):
    jobs = jobs_for(num_ranks, [5])
    results = pool.run(num_ranks, train_jobs, jobs, limit=100)
    for index, job in enumerate(jobs):
        assert_equals_monolith([ranks[index] for ranks in results], job)
        measured = [ranks[index].peak_in_flight for ranks in results]
        assert measured == peak_in_flight(job.schedule)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_more_of_what_is_found_trains_with_the_monoliths_bits(pool, num_ranks):
    for changes in ({"optimizer": "adam"}, {"dtype": "bfloat16"}):
        jobs = jobs_for(num_ranks, [3, 8] if num_ranks < 8 else [8], changes.items())
        results = pool.run(num_ranks, train_jobs, jobs, limit=300)
        for index, job in enumerate(jobs):
            assert_equals_monolith([ranks[index] for ranks in results], job)


@pytest.mark.slow
def test_training_with_auto(tmp_path):
    flags = ["--schedule", "auto", "--num-chunks", "2", "--memory-cap", "3", "--num-iterations", "4"]
    ran = torchrun(2, "step6_schedules", *flags, "--result", tmp_path / "r.json")
    assert ran.status == 0, ran.text
    assert "in flight" in ran.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    whole = python("step0_monolith", "--num-iterations", "4", "--result", tmp_path / "m.json")
    assert whole.status == 0, whole.text
    assert found["weights_sha256"] == json.loads((tmp_path / "m.json").read_text())["weights_sha256"]
    assert found["schedule"] == "auto"
    assert max(found["peak_in_flight"]) <= 3


def test_a_table_that_keeps_some_whole_backwards_wins_where_those_are_cheaper():
    cost = Cost(F=1.7, B=2.0, I=1.0, W=2.0, named=("F", "B", "I", "W"))
    wanted = Wanted(3, 9, 2, "v", True, cost)
    best = min(each.makespan for each in published(wanted))
    assert makespan(find(wanted), cost) <= best
    assert compare(wanted, find(wanted)) == "auto: same as dualpipe-v: 73 with 7 in flight"


def test_too_large_a_search_is_refused():
    with pytest.raises(UsageError, match="up to 300000 actions, and this one has 400000"):
        choose(ScheduleOptions(schedule="auto"), 2, 100_000)


def test_what_the_search_proves_beyond_the_cheap_bound_is_said():
    choice = choose(ScheduleOptions(schedule="auto", num_chunks=2, memory_cap="6", cost="F=1,B=1"), 4, 8)
    table = choice.make()
    assert makespan(table, costs(1, 1)) == choice.bound() == 42 > lower_bound(table, costs(1, 1), [6] * 4)
