"""Insertion: each microbatch's whole chain of actions goes into the free gaps that the microbatches before it left."""

from bisect import bisect_left, insort

from step6_schedules.search.problem import Problem, Rows


def insert(p: Problem, limit: int) -> tuple[Rows | None, int]:
    """Rows, None when the effort passes `limit`, and the effort. A split backward goes in as one block, I then W.

    A chain starts as early as it can; it is moved on as a whole as long as it would break a cap. So an activation lives
    no longer than the chain needs, which is what a small cap wants.
    """
    S = p.S
    time = [t + (p.time[S + x] if p.split and x >= S else 0) for x, t in enumerate(p.time[: 2 * S])]
    busy = [[] for _ in range(p.num_ranks)]  # (start, end), sorted
    held = [[] for _ in range(p.num_ranks)]  # (time, +1 or -1), sorted
    last = [0] * (2 * S)
    effort = 0
    placed = [[] for _ in range(p.num_ranks)]
    for m in range(p.num_microbatches):
        for begin in _begins(p, time, busy, last[0]):
            effort += 2 * S
            if effort > limit:
                return None, effort
            starts = _chain(p, time, busy, last, begin)
            if p.caps is None or _room(p, time, held, starts):
                break
        for x in p.chain:
            r, t = p.rank[x], starts[x]
            insort(busy[r], (t, t + time[x]))
            insort(held[r], (t, 1) if x < S else (t + time[x], -1))
            last[x] = t + time[x]
            placed[r].append((t, 0, x, m))
            if p.split and x >= S:
                placed[r].append((t, 1, x + S, m))
        for r, acts in enumerate(p.on):
            _forget(busy[r], held[r], min(last[x] for x in acts if x < 2 * S))
    return [[(x, m) for _, _, x, m in sorted(row)] for row in placed], effort


def _begins(p, time, busy, first):
    """The starts worth a try: the first, and those where some action of the chain begins as its rank becomes free."""
    out, gone = {first}, 0
    for x in p.chain:
        gone += p.delay[x]
        out.update(end - gone for _, end in busy[p.rank[x]] if end - gone > first)
        gone += time[x]
    return sorted(out)


def _chain(p, time, busy, last, begin):
    """-> the start of each act, each in the first gap that holds it."""
    starts, t = [0] * len(last), begin
    for x in p.chain:
        row, need = busy[p.rank[x]], time[x]
        t = max(t + p.delay[x], last[x])
        i = bisect_left(row, (t, 0))
        if i:
            t = max(t, row[i - 1][1])
        while i < len(row) and row[i][0] < t + need:
            t = max(t, row[i][1])
            i += 1
        starts[x] = t
        t += need
    return starts


def _room(p, time, held, starts):
    """Whether the caps still hold with this chain in."""
    for r, acts in enumerate(p.on):
        mine = [(starts[x], 1) if x < p.S else (starts[x] + time[x], -1) for x in acts if x < 2 * p.S]
        live = 0
        for _, step in sorted(held[r] + mine):
            live += step
            if live > p.caps[r]:
                return False
    return True


def _forget(busy, held, now):
    """Drop what lies before `now`, when the rank's next action can start at the earliest."""
    while busy and busy[0][1] <= now:
        busy.pop(0)
    live = 0
    while held and held[0][0] <= now:
        live += held.pop(0)[1]
    held[:0] = [(now, 1)] * live
