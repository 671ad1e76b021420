"""List scheduling: each rank follows a fixed order of forwards and one of backwards and takes what is ready first."""

from collections.abc import Iterator
from heapq import heappop, heappush

from step6_schedules.search.problem import Problem, Rows, Run

# How microbatches follow each other, see `orders`; most forwards ahead, a number a rank.
Rule = int | tuple[float, float]
Limits = tuple[int, ...]


def orders(p: Problem, rule: Rule) -> tuple[list[list[Run]], list[list[Run]]]:
    """For each rank the order of its forwards, and that of its B or I.

    rule G (int): groups of G microbatches, chunk by chunk, as in the interleaved schedule.
    rule (f, b) (times): as if microbatch m entered f * m (backwards: b * m) after the first and never waited.
    """
    if isinstance(rule, int):
        forward = backward = lambda a: (a[1] // rule, p.head[a[0]], a[1])
    else:
        forward = lambda a: (p.head[a[0]] + rule[0] * a[1], -p.head[a[0]])  # noqa: E731
        backward = lambda a: (p.head[a[0]] + rule[1] * a[1], p.head[a[0]])  # noqa: E731
    S, ms = p.S, range(p.num_microbatches)
    fs = [sorted(((x, m) for x in acts if x < S for m in ms), key=forward) for acts in p.on]
    bs = [sorted(((x, m) for x in acts if S <= x < 2 * S for m in ms), key=backward) for acts in p.on]
    return fs, bs


def greedy(p: Problem, rule: Rule, limits: Limits, strict: bool) -> Rows | None:
    """Rows, or None when the orders and the caps stop each other.

    limits: most forwards ahead of the backwards, a number a rank. strict: fill up to the limit, then one backward, one
    forward in turn, even when the other kind could start sooner; else whichever can start first (a backward if equal).
    W runs when nothing else can start before it.
    """
    S, P = p.S, p.num_ranks
    fs, bs = orders(p, rule)
    ws = [[] for _ in range(P)]
    at = [[0, 0, 0] for _ in range(P)]  # done on each rank: backwards, forwards, W
    ready = {(0, m): 0 for m in range(p.num_microbatches)}
    rows, free, live, stamp, heap = [[] for _ in range(P)], [0] * P, [0] * P, [0] * P, []

    def choose(r):
        """Put the rank's next action into the heap; an older choice of the rank is out of date then."""
        b, f, w = at[r]
        forward = f < len(fs[r]) and f - b < limits[r]
        options = []
        if b < len(bs[r]) and not (strict and forward) and bs[r][b] in ready:
            options.append((max(free[r], ready[bs[r][b]]), 0, bs[r][b]))
        if forward and (p.caps is None or live[r] < p.caps[r]) and fs[r][f] in ready:
            options.append((max(free[r], ready[fs[r][f]]), 1, fs[r][f]))
        if w < len(ws[r]):
            options.append((free[r], 2, ws[r][w]))
        stamp[r] += 1
        if options:
            start, kind, action = min(options)
            heappush(heap, (start, r, stamp[r], kind, action))

    choose(p.rank[0])
    while heap:
        start, r, mark, kind, (x, m) = heappop(heap)
        if mark != stamp[r]:
            continue
        rows[r].append((x, m))
        at[r][kind] += 1
        live[r] += (x < S) - (x // S == p.release)
        free[r] = start + p.time[x]
        for y in p.next[x]:
            if y >= 2 * S:
                ws[r].append((y, m))
            else:
                ready[y, m] = free[r] + p.delay[y]
                if p.rank[y] != r:
                    choose(p.rank[y])
        choose(r)
    return rows if sum(map(len, rows)) == p.num_acts * p.num_microbatches else None


def settings(p: Problem) -> Iterator[tuple[Rule, Limits, bool]]:
    """The (rule, limits, strict) to try, the likeliest first."""
    P, M, V = p.num_ranks, p.num_microbatches, p.num_chunks
    caps = tuple(p.caps or [V * M] * P)
    sizes = [g for g in (P, 1, 2, *range(3, 2 * P + 1), *(-(-M // k) for k in (1, 2, 3, 4))) if g <= M]
    entry = [p.time[0] * k for k in (2, 1.5, 1, 3, 4, 6)]
    pairs = [(f, b) for f in entry for b in entry]
    loop = p.is_loop
    rules = list(dict.fromkeys(sizes[:1] + pairs + sizes if loop else pairs + sizes))

    def ahead(rule, slope, extra):
        group = rule if isinstance(rule, int) else 0
        return tuple(max(V, min(c, slope * (P - 1 - r) + (V - 1) * group + extra)) for r, c in enumerate(caps))

    if loop:
        yield rules[0], ahead(rules[0], 1, 1), True
    for rule in rules:
        yield rule, caps, False
    for rule in rules:
        for limits in dict.fromkeys((ahead(rule, 1, 1), ahead(rule, 2, 1), ahead(rule, 1, 2), caps)):
            yield rule, limits, True
