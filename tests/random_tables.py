"""Random tables, and what makes a table legal, said a second time and as plainly as possible.

Nothing here uses the rules of step5_orchestrator: what waits for what is written out again, so that a mistake on either
side shows.
"""

from collections import Counter
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from random import Random

from hypothesis import strategies as st

from step5_orchestrator.actions import Action
from step5_orchestrator.table import Table, make_table

DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}


def waits_for(action: Action, there: set[Action], num_stages: int) -> list[Action]:
    """The actions whose results an action uses."""
    stage, op, m = action
    if op == "F":
        return [Action(stage - 1, "F", m)] if stage > 0 else []
    if op == "W":
        return [Action(stage, "I", m)]
    later = [a for a in (Action(stage + 1, "B", m), Action(stage + 1, "I", m)) if a in there]
    return [Action(stage, "F", m), *(later if stage + 1 < num_stages else [])]


def is_legal(table: Table) -> bool:
    """Whether the rows hold each action exactly once, each stage on one rank, and all rows can run to their ends."""
    actions = [action for row in table.rows for action in row]
    there = set(actions)
    if not all(table.rows) or any(s < 0 or m < 0 or op not in DURATION for s, op, m in actions):
        return False
    num_stages, num_microbatches = 1 + max(a.stage for a in actions), 1 + max(a.microbatch for a in actions)
    count = Counter(actions)
    for stage in range(num_stages):
        if sum(any(a.stage == stage for a in row) for row in table.rows) != 1:
            return False
        for m in range(num_microbatches):
            f, b, i, w = (count[Action(stage, op, m)] for op in "FBIW")
            if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                return False
    graph = {a: set(waits_for(a, there, num_stages)) for a in actions}
    for row in table.rows:
        for first, second in pairwise(row):
            graph[second].add(first)
            if first in table.pairs and (first.op != "F" or second.op not in "BI"):
                return False
        if row[-1] in table.pairs:
            return False
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


def _adding(actions: set[Action], stage: int) -> list[int]:
    return [a.microbatch for a in actions if a.stage == stage and a.op in "BW"]


@st.composite
def legal_tables(draw, max_ranks: int = 4, max_stages: int = 6, max_microbatches: int = 4) -> Table:
    """A table that a list scheduler writes which takes any action that can run, on any rank.

    Stages lie anywhere, each backward is whole or split, some forwards are paired with a backward that follows them,
    an op may be put off as long as anything else can run, and half of the tables add weight gradients in order.
    """
    num_ranks = draw(st.integers(1, max_ranks))
    num_stages = draw(st.integers(num_ranks, min(num_ranks + 3, max_stages)))
    num_microbatches = draw(st.integers(1, max_microbatches))
    splits = draw(st.sampled_from(["none", "all", "some"]))
    put_off = draw(st.sampled_from(["", "F", "B", "I", "W"]))
    # Hypothesis chooses, and shrinks, the sizes; a draw for each of the many small choices would take long.
    random = Random(draw(st.integers(0, 2**32 - 1)))
    adds_in_order = random.random() < 0.5
    owner = [*range(num_ranks), *(random.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    random.shuffle(owner)
    left = set()
    for stage in range(num_stages):
        for m in range(num_microbatches):
            split = splits == "all" or (splits == "some" and random.random() < 0.5)
            left |= {Action(stage, op, m) for op in ("FIW" if split else "FB")}
    there = frozenset(left)
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    while left:
        ready = sorted(a for a in left if left.isdisjoint(waits_for(a, there, num_stages)))
        if adds_in_order:
            ready = [a for a in ready if a.op not in "BW" or a.microbatch == min(_adding(left, a.stage))]
        ready = [a for a in ready if a.op != put_off] or ready
        rank = random.choice(sorted({owner[a.stage] for a in ready}))
        action = random.choice([a for a in ready if owner[a.stage] == rank])
        rows[rank].append(action)
        left.remove(action)
    can_pair = [a for row in rows for a, b in pairwise(row) if a.op == "F" and b.op in "BI"]
    share = random.choice([0, 0.5, 1])
    return make_table("random", rows, [a for a in can_pair if random.random() < share])


MUTATIONS = ("swap", "drop", "duplicate", "microbatch", "stage", "op", "rank", "place")


@st.composite
def mutants(draw, table: Table, kinds: Sequence[str] = MUTATIONS) -> tuple[str, Table]:
    """The table with one thing changed, and the name of the change. Moves within a row are often short: they often
    leave the table legal.
    """
    kind = draw(st.sampled_from([k for k in kinds if k != "rank" or table.num_ranks > 1]))
    rows = [list(row) for row in table.rows]
    rank = draw(st.integers(0, len(rows) - 1))
    row = rows[rank]
    index = draw(st.integers(0, len(row) - 1))
    near = [i for i in (index - 1, index + 1) if 0 <= i < len(row)]
    elsewhere = st.sampled_from(near) | st.sampled_from([i for i in range(len(row)) if i != index])
    stage, op, m = row[index]
    if kind == "swap":
        other = draw(elsewhere)
        row[index], row[other] = row[other], row[index]
    elif kind == "place":
        row.insert(draw(elsewhere), row.pop(index))
    elif kind == "rank":
        goal = rows[draw(st.integers(0, len(rows) - 1).filter(lambda x: x != rank))]
        goal.insert(draw(st.integers(0, len(goal))), row.pop(index))
    elif kind == "drop":
        row.pop(index)
    elif kind == "duplicate":
        goal = rows[draw(st.integers(0, len(rows) - 1))]
        goal.insert(draw(st.integers(0, len(goal))), row[index])
    elif kind == "microbatch":
        row[index] = Action(stage, op, draw(st.integers(-1, table.num_microbatches).filter(lambda x: x != m)))
    elif kind == "stage":
        row[index] = Action(draw(st.integers(-1, table.num_stages + 1).filter(lambda x: x != stage)), op, m)
    else:
        row[index] = Action(stage, draw(st.sampled_from([x for x in "FBIWX" if x != op])), m)
    return kind, make_table("mutant", rows, table.pairs)
