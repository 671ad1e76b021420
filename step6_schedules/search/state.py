"""A partial schedule of the beam search, and how far it is from done: the bound it cannot beat."""

from step6_schedules.search.problem import Problem

INF = float("inf")


class State:
    """Actions so far. Microbatches ascend, so a counter an act says which have run.

    done: runs of each act. waiting: for each act the times its next microbatches are there (the predecessor has run).
    free, live: time and activations of each rank. held: a bit for each act its rank has put off until after another.
    After `judge`: acts = (start, end, act) that may be next, bound = no completion is shorter, profile = all the times
    that the future depends on, so that of two states with equal counters one with no time later is as good.
    """

    __slots__ = (
        "act",
        "acts",
        "bound",
        "done",
        "free",
        "held",
        "key",
        "live",
        "next_start",
        "parent",
        "profile",
        "spread",
        "waiting",
    )  # fmt: skip


class Judge:
    """Makes states and judges them; what does not change during a search is worked out once."""

    def __init__(self, p: Problem) -> None:
        self.p, S = p, p.S
        self.bits = p.num_microbatches.bit_length()
        self.forwards = [[x for x in acts if x < S] for acts in p.on]
        self.chain = [[x for x in acts if x < 2 * S] for acts in p.on]
        self.weights = [[x for x in acts if x >= 2 * S] for acts in p.on]
        self.forward_bits = [sum(1 << x for x in acts) for acts in self.forwards]
        self.rank_bits = [sum(1 << x for x in acts) for acts in p.on]
        self.steps = [(x, p.pred[x], p.delay[x], p.rank[x], p.time[x]) for x in p.order]
        self.rest = [0] * p.num_acts  # from this act to the end of the chain, the work of one microbatch on the rank
        self.rest_w = [0] * p.num_acts  # the same with the W of those backwards
        for acts in self.chain:
            work = weight = 0
            for x in reversed(acts):
                work += p.time[x]
                weight += p.time[x + S] if p.split and x >= S else 0
                self.rest[x], self.rest_w[x] = work, work + weight

    def first(self) -> State:
        """Nothing has run; all microbatches are there (one entry stands for all that are left)."""
        p, s = self.p, State()
        s.parent, s.act, s.key, s.held = None, -1, 0, 0
        s.done, s.waiting = [0] * p.num_acts, [()] * p.num_acts
        s.waiting[0] = (0,)
        s.free, s.live = [0] * p.num_ranks, [0] * p.num_ranks
        self.judge(s)
        return s

    def after(self, s: State, x: int, start: float, held: int) -> State:
        """The state after act x, begun at `start`, has run its next microbatch."""
        p, c = self.p, State()
        r, end = p.rank[x], start + p.time[x]
        c.parent, c.act, c.key, c.held = s, x, s.key + (1 << self.bits * x), held & ~self.rank_bits[r]
        c.done, c.waiting, c.free, c.live = s.done.copy(), s.waiting.copy(), s.free.copy(), s.live.copy()
        c.done[x] += 1
        c.waiting[x] = c.waiting[x][1:] if x else (0,) * (c.done[0] < p.num_microbatches)
        for y in p.next[x]:
            c.waiting[y] += (end + p.delay[y],)
        c.free[r] = end
        c.live[r] += (x < p.S) - (x // p.S == p.release)
        return c

    def closed(self, s: State, r: int) -> int:
        """Bits of the acts rank r may not run now: put off, or forwards that the cap forbids.

        A forward that is not of the last chunk must leave room for the oldest microbatch k whose last chunk has not run
        here: activations of younger ones cannot be freed before it has, and it needs V places. Without this the search
        would run into dead ends; with it, it never has to.
        """
        p, caps = self.p, self.p.caps
        bits = s.held & self.rank_bits[r]
        if caps is None:
            return bits
        if s.live[r] >= caps[r]:
            return bits | self.forward_bits[r]
        *early, last = self.forwards[r]
        young = s.done[last] + 1
        if sum(s.done[x] - young for x in early if s.done[x] > young) >= caps[r] - p.num_chunks:
            for x in early:
                if s.done[x] >= young:
                    bits |= 1 << x
        return bits

    def judge(self, s: State) -> bool:
        """Fills in acts, bound, spread (the sum of the ranks' bounds) and profile; False if the state is a dead end."""
        p, M = self.p, self.p.num_microbatches
        done, waiting, free = s.done, s.waiting, s.free
        start, end = [INF] * p.num_acts, [INF] * p.num_acts  # earliest, of each act's next microbatch
        for x, before, delay, r, time in self.steps:
            if waiting[x]:
                t = waiting[x][0]
            elif done[x] == M:
                continue
            else:
                t = end[before] + delay
            start[x] = t = t if t > free[r] else free[r]
            end[x] = t + time
        s.next_start, s.acts, s.bound, s.spread = start, [], 0, 0
        for r, acts in enumerate(p.on):
            closed, begin = self.closed(s, r), INF
            for x in acts:
                t = start[x]
                if t < INF and not closed >> x & 1:
                    if t < begin:
                        begin = t
                    if waiting[x]:
                        s.acts.append((t, end[x], x))
            if begin < INF:
                bound = self.rank_bound(s, r, begin, start)
            elif any(done[x] < M for x in acts):
                return False
            else:
                bound = free[r]
            s.spread += bound
            if bound > s.bound:
                s.bound = bound
        for x in p.order:
            if end[x] < INF and end[x] + p.tail[x] > s.bound:
                s.bound = end[x] + p.tail[x]
        self.fill_profile(s)
        return True

    def rank_bound(self, s: State, r: int, begin: float, start: list[float]) -> float:
        """When rank r and what follows it can end: from `begin` on, and from each act's next microbatch on."""
        p, S, M, done = self.p, self.p.S, self.p.num_microbatches, s.done
        work, tail = 0, p.tail[self.chain[r][-1]]
        late = late_w = 0
        for x in self.chain[r]:
            left = M - done[x]
            if left:
                work += p.time[x] * left
                late = max(late, start[x] + self.rest[x] * left)
                late_w = max(late_w, start[x] + self.rest_w[x] * left)
        weight = sum(p.time[x] * (M - done[x]) for x in self.weights[r])
        if not work:
            return begin + weight
        idle = begin
        if p.caps is not None:
            # Until the next backward the rank has only the forwards that fit and the W at hand, which make room.
            backward = min(start[x] for x in self.chain[r] if x >= S)
            ready = [x for x in self.weights[r] for _ in s.waiting[x]]
            room = p.caps[r] - s.live[r] + len(ready)
            filled = room * max(p.time[x] for x in self.forwards[r])
            idle = max(idle, backward - filled - sum(p.time[x] for x in ready))
            late = max(late, backward - filled + work)
        return max(begin + work + tail, late + tail, idle + work + weight, late_w)

    def fill_profile(self, s: State) -> None:
        """The times that matter from here on: earlier than the next possible start makes no difference."""
        now = min((end for _, end, _ in s.acts), default=INF)
        s.profile = profile = []
        for r, acts in enumerate(self.p.on):
            first = now
            for x in acts:
                if s.waiting[x] and s.waiting[x][0] < first:
                    first = s.waiting[x][0]
            if s.free[r] > first:
                first = s.free[r]
            profile.append(first)
            for x in acts:
                profile += [t if t > first else first for t in s.waiting[x]]
