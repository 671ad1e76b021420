"""Beam search: extend the most promising partial schedules action by action, `width` of them at a time."""

from collections.abc import Iterator, Sequence
from operator import le

from step6_schedules.search.problem import Problem, Rows
from step6_schedules.search.state import INF, Judge, State

# Start times of a known table, [act][microbatch].
Guide = Sequence[Sequence[float]]


class Beam:
    """Searches of one problem. effort: acts looked at so far; a search gives up when it passes `limit`."""

    def __init__(self, p: Problem, limit: float = INF) -> None:
        self.p, self.limit, self.effort, self.judge = p, limit, 0, Judge(p)

    def run(
        self, width: int, target: float, guide: Guide | None = None, patient: bool = True, rivals: int = 8
    ) -> tuple[Rows | None, bool]:
        """Rows with a makespan <= target or None, and whether nothing was cut off: then None proves there are none.

        guide: start times of a known schedule, [act][microbatch]; states are then ranked by how far behind (or ahead
        of) it they are, not by their bound. patient: also try to leave a rank idle until something better comes.
        """
        p, level, complete = self.p, [self.judge.first()], True
        for _ in range(p.num_microbatches * p.num_acts):
            found, seen = [], {}
            for state in level:
                if self.effort > self.limit:
                    return None, False
                for x, start, held in self.moves(state, guide, patient):
                    self.effort += p.num_acts
                    child = self.judge.after(state, x, start, held)
                    if not self.judge.judge(child) or child.bound > target:
                        continue
                    others = seen.setdefault(child.key, [])
                    if any(h & ~child.held == 0 and all(map(le, o, child.profile)) for h, o in others):
                        continue
                    if len(others) >= rivals:
                        complete = False
                        continue
                    others.append((child.held, child.profile))
                    rank = self.behind(child, guide) if guide else child.bound
                    found.append((rank, child.spread, len(found), child))
            found.sort()
            complete = complete and patient and len(found) <= width
            level = [entry[3] for entry in found[:width]]
            if not level:
                return None, complete
        return self.rows(min(level, key=lambda s: max(s.free))), complete

    def moves(self, state: State, guide: Guide | None, patient: bool) -> Iterator[tuple[int, float, int]]:
        """(act, start, held) of the next action: all that may be first on the rank that would finish one first.

        Some best schedule always continues so (Giffler and Thompson): whatever else that rank did first would leave a
        gap in which the action fits. Only a forward must not always fill a gap, as it takes memory: so it may also be
        put off (held) until the rank has run something else, and then the question is asked again.
        """
        p, held = self.p, state.held
        options = {}
        for start, end, x in state.acts:
            options.setdefault(p.rank[x], []).append((end, -x, start))
        not_before = {}
        while options:
            first, r = min((min(acts)[0], r) for r, acts in options.items())
            acts = options.pop(r)
            for _, x, start in sorted(acts, key=lambda a: -a[1]):
                if not_before.get(r, -1) <= start < first:
                    yield -x, start, held
            x = -min(acts)[1]
            if not patient or x >= (2 if guide else 1) * p.S or (p.caps is None and not guide):
                return
            if guide and all(
                guide[y][state.done[y]] >= guide[x][state.done[x]]
                for y in p.on[r]
                if state.done[y] < p.num_microbatches
            ):
                return
            held |= 1 << x
            not_before[r] = first
            acts = [a for a in acts if a[1] != -x]
            if acts:
                options[r] = acts

    def behind(self, state: State, guide: Guide) -> float:
        """The longest delay against the guide plus twice the mean; being ahead counts for little."""
        p = self.p
        enough = -4 * min(t for t in p.time if t > 0)
        late = [
            max(enough, start - guide[x][n])
            for x, (start, n) in enumerate(zip(state.next_start, state.done, strict=True))
            if n < p.num_microbatches
        ]
        return max(late) + 2 * sum(late) / len(late) if late else -INF

    def rows(self, state: State) -> Rows:
        """The rows that led to this state."""
        p, acts = self.p, []
        while state.parent is not None:
            acts.append((state.act, state.parent.done[state.act]))
            state = state.parent
        rows = [[] for _ in range(p.num_ranks)]
        for x, m in reversed(acts):
            rows[p.rank[x]].append((x, m))
        return rows
