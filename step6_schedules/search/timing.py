"""When every action of given rows runs, and how many activations each rank holds."""

from collections.abc import Sequence

from step6_schedules.search.problem import Problem, Rows, Starts


def times(p: Problem, rows: Rows) -> tuple[float, Starts, list[int]]:
    """The makespan, the start of each action, and the peak in flight of each rank.

    Raises ValueError if the rows wait for each other, or miss, repeat or misorder an action.
    """
    at, free, start = [0] * p.num_ranks, [0] * p.num_ranks, {}
    waiting = list(range(p.num_ranks))
    while waiting:
        r = waiting.pop()
        while at[r] < len(rows[r]):
            x, m = rows[r][at[r]]
            t, a = free[r], p.pred[x]
            if a >= 0:
                if (a, m) not in start:
                    break
                t = max(t, start[a, m] + p.time[a] + p.delay[x])
            start[x, m] = t
            free[r] = t + p.time[x]
            at[r] += 1
            waiting += [p.rank[y] for y in p.next[x] if p.rank[y] != r]
    if len(start) != p.num_acts * p.num_microbatches or any(a < len(row) for a, row in zip(at, rows, strict=True)):
        raise ValueError("the rows wait for each other, or an action is missing")
    peaks = []
    for row in rows:
        live = peak = 0
        count = [0] * p.num_acts
        for x, m in row:
            if m != count[x]:
                raise ValueError("a stage's microbatches must come in ascending order")
            count[x] += 1
            live += (x < p.S) - (x // p.S == p.release)
            peak = max(peak, live)
        peaks.append(peak)
    return max(free), start, peaks


def fits(peaks: Sequence[int], caps: Sequence[int] | None) -> bool:
    """Whether these peaks stay within the caps."""
    return caps is None or all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))
