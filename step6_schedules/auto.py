"""`--schedule auto`: a table that is searched for, and how it compares with the published ones."""

from collections.abc import Sequence
from typing import NamedTuple

from step0_monolith.options import UsageError
from step5_orchestrator.actions import Action
from step5_orchestrator.choose import Choice
from step5_orchestrator.costs import Cost
from step5_orchestrator.prediction import makespan, peak_in_flight
from step5_orchestrator.table import Table, make_table
from step5_orchestrator.words import counted
from step6_schedules.placement import rank_of_stage
from step6_schedules.schedules import SCHEDULES
from step6_schedules.search.problem import Problem, Rows
from step6_schedules.search.solver import solve
from step6_schedules.search.timing import fits

MAX_ACTIONS = 300_000


class Wanted(NamedTuple):
    """What a table is searched for: sizes, placement, whether B is split, costs, and the most each rank may hold."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int
    placement: str
    splits: bool
    cost: Cost
    caps: Sequence[int] | None = None

    def problem(self) -> Problem:
        """The same as a search problem."""
        stages = range(self.num_ranks * self.num_chunks)
        owners = [rank_of_stage(self.placement, self.num_ranks, stage) for stage in stages]
        return Problem(owners, self.num_microbatches, self.cost, self.splits, self.caps)


class Published(NamedTuple):
    """A published schedule's table of the same sizes and placement, with what it takes and holds.

    changes: in how many ways it differs from the schedule as it is by default; the name says which.
    """

    name: str
    changes: int
    table: Table
    makespan: float
    peaks: list[int]


def split_in_two(table: Table) -> Table:
    """The same table with each B as an I and, right after it, its W."""
    rows = [
        [part for action in row for part in ([action] if action.op != "B" else [*halves(action)])] for row in table.rows
    ]
    return make_table(table.name, rows)


def halves(action: Action) -> tuple[Action, Action]:
    """The I and the W of a B."""
    return action._replace(op="I"), action._replace(op="W")


def published(wanted: Wanted) -> list[Published]:
    """The published schedules that have these chunks and this placement; where B is to be split, with B split too."""
    found = []
    for schedule in SCHEDULES.values():
        is_placed = schedule.placement == wanted.placement or wanted.num_chunks == 1 or wanted.num_ranks == 1
        if not is_placed or schedule.only_chunks not in (None, wanted.num_chunks):
            continue
        if schedule.splits and not wanted.splits:
            continue
        try:
            table = schedule.table(wanted.num_ranks, wanted.num_microbatches, wanted.num_chunks, wanted.cost)
        except UsageError:
            continue  # has no table of this size
        changes = [f"with {counted(wanted.num_chunks, 'chunk')}"] * (wanted.num_chunks != schedule.default_chunks)
        found.append(_published(schedule.name, changes, table, wanted.cost))
        if wanted.splits and "B" in table.ops:
            changes = [*changes, "with its backward split"]
            found.append(_published(schedule.name, changes, split_in_two(table), wanted.cost))
    return found


def _published(name: str, changes: Sequence[str], table: Table, cost: Cost) -> Published:
    named = " ".join([name, " and ".join(changes)]).strip()
    return Published(named, len(changes), table, makespan(table, cost), peak_in_flight(table))


def find(wanted: Wanted) -> Table:
    """The best table that the search finds, see `find_and_prove`."""
    return find_and_prove(wanted)[0]


def find_and_prove(wanted: Wanted, others: Sequence[Published] | None = None) -> tuple[Table, float]:
    """The best table that the search finds, the shortest and among those one that holds little; and a lower bound.

    The bound is the makespan itself where the search has gone through everything that could be shorter. The table is
    never slower than a published one that fits the caps, since the search starts from those. Deterministic: its effort
    is counted. Raises UsageError when no table fits the caps.
    """
    check_caps(wanted)
    problem = wanted.problem()
    others = published(wanted) if others is None else others
    searchable = [each.table for each in others if set(each.table.ops) == set(problem.ops)]
    found = solve(problem, [as_runs(problem, table) for table in searchable])
    # Where B takes less than I and W together, one that keeps some B may be the shortest.
    best = min((each for each in others if fits(each.peaks, wanted.caps)), key=_by_time, default=None)
    if best is not None and best.makespan < found.makespan * (1 - 1e-9):
        return make_table("auto", best.table.rows), 0.0
    num_stages = problem.S
    rows = [[Action(x % num_stages, problem.ops[x // num_stages], m) for x, m in row] for row in found.rows]
    return make_table("auto", rows), found.bound


def as_runs(problem: Problem, table: Table) -> Rows:
    """A table's rows in the search's numbers."""
    return [[(problem.ops.index(op) * problem.S + stage, m) for stage, op, m in row] for row in table.rows]


def check_caps(wanted: Wanted) -> None:
    """Raises UsageError when the caps leave no room for any table."""
    if wanted.caps is not None and min(wanted.caps) < wanted.num_chunks:
        rank = min(range(wanted.num_ranks), key=wanted.caps.__getitem__)
        raise UsageError(
            f"--memory-cap {min(wanted.caps)}: rank {rank} holds its {wanted.num_chunks} chunks of one microbatch at "
            f"the same time, so {wanted.num_chunks} is the least"
        )


def compare(wanted: Wanted, table: Table, others: Sequence[Published] | None = None) -> str:
    """One sentence: what was found, against the best published schedule of these sizes that fits the memory."""
    takes, holds = makespan(table, wanted.cost), max(peak_in_flight(table))
    others = published(wanted) if others is None else others
    if not others:
        return f"auto: {takes:g} with {holds} in flight; no published schedule has these chunks and this placement"
    fastest = min(others, key=_by_time)
    fitting = [each for each in others if fits(each.peaks, wanted.caps)]
    sentence = "auto: " + (
        _against(min(fitting, key=_by_time), takes, holds) if fitting else f"{takes:g} with {holds} in flight"
    )
    if not fits(fastest.peaks, wanted.caps) and fastest.makespan < takes:
        name, theirs = fastest.name, max(fastest.peaks)
        sentence += f"; {name} takes {fastest.makespan:g} with {theirs}, beyond the memory cap"
    return sentence


def _by_time(each: Published) -> tuple[float, int, int]:
    return each.makespan, max(each.peaks), each.changes


def _against(best: Published, takes: float, holds: int) -> str:
    name, theirs = best.name, max(best.peaks)
    if abs(takes - best.makespan) > 1e-9 * takes:
        return f"beats {name}: {takes:g} with {holds} in flight instead of {best.makespan:g} with {theirs}"
    if holds < theirs:
        return f"beats {name}: {takes:g} with {holds} in flight instead of {theirs}"
    return f"same as {name}: {takes:g} with {holds} in flight"


def wanted_from(options, num_ranks: int, num_microbatches: int, cost: Cost, caps: Sequence[int] | None) -> Wanted:
    """What the flags ask for: one chunk in a loop, two in a V, split where the costs name I or W and no B."""
    placement = options.placement or "loop"
    num_chunks = options.num_chunks or (2 if placement == "v" else 1)
    splits = cost.names_split if options.split is None else options.split == "yes"
    return Wanted(num_ranks, num_microbatches, num_chunks, placement, splits, cost, caps)


def search_for(options, num_ranks: int, num_microbatches: int, cost: Cost, caps: Sequence[int] | None) -> Choice:
    """The choice of a table that rank 0 will search for. Raises UsageError when no table can fit the caps."""
    wanted = wanted_from(options, num_ranks, num_microbatches, cost, caps)
    check_caps(wanted)
    num_stages = num_ranks * wanted.num_chunks
    actions = num_stages * num_microbatches * (3 if wanted.splits else 2)
    if actions > MAX_ACTIONS:
        raise UsageError(
            f"auto looks through tables of up to {MAX_ACTIONS} actions, and this one has {actions}; take fewer"
        )
    known: dict[str, list[Published]] = {}
    proved = [0.0]

    def make() -> Table:
        known["others"] = published(wanted)
        table, proved[0] = find_and_prove(wanted, known["others"])
        return table

    return Choice(
        num_stages, make, True, say=lambda table: compare(wanted, table, known["others"]), bound=lambda: proved[0]
    )
