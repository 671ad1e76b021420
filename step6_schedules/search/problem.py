"""The scheduling problem in numbers: every (op, stage) becomes one index, an "act", that runs once a microbatch."""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd

from step5_orchestrator.actions import Action
from step5_orchestrator.costs import Cost

# One action, as (act, microbatch).
Run = tuple[int, int]
Rows = list[list[Run]]
Starts = dict[Run, float]


class Problem:
    """One search problem.

    Acts are numbered op by op: stage s has act s (F), S + s (B, or I when split) and 2S + s (W when split). An act has
    at most one predecessor: the forwards and backwards of one microbatch form a single chain, F0 .. F(S-1) and then
    B(S-1) .. B0, and each W hangs on its I. Times are in the unit of `cost`; `caps` counts chunk activations, one
    number a rank.
    """

    def __init__(
        self, rank_of_stage: Sequence[int], num_microbatches: int, cost: Cost, split: bool, caps: Sequence[int] | None
    ) -> None:
        """Raises ValueError when a cap holds no table: before the last chunk's backward a rank holds all its chunks of
        the microbatch, and one microbatch at a time needs no more than that.
        """
        self.num_ranks, self.num_microbatches = max(rank_of_stage) + 1, num_microbatches
        self.rank_of_stage, self.cost, self.split, self.caps = tuple(rank_of_stage), cost, split, caps
        rank_of_stage = tuple(rank_of_stage)
        self.chunks = [rank_of_stage.count(rank) for rank in range(self.num_ranks)]
        self.num_chunks = max(self.chunks)
        if caps is not None and any(cap < chunks for cap, chunks in zip(caps, self.chunks, strict=True)):
            raise ValueError(f"every rank needs room for its {self.chunks} chunks of a microbatch, caps are {caps}")
        self.ops = "FIW" if split else "FB"
        self.S = S = len(rank_of_stage)
        self.is_loop = all(rank == s % self.num_ranks for s, rank in enumerate(rank_of_stage))
        self.num_acts = n = S * len(self.ops)
        self.rank = [rank_of_stage[x % S] for x in range(n)]
        self.time = [_plain(cost.of(Action(x % S, self.ops[x // S], 0))) for x in range(n)]
        self.chain = list(range(S)) + list(range(2 * S - 1, S - 1, -1))
        self.order = self.chain + list(range(2 * S, n))  # predecessors come first
        self.pred = [-1] * n
        for a, b in pairwise(self.chain):
            self.pred[b] = a
        for w in range(2 * S, n):
            self.pred[w] = w - S
        self.next: list[list[int]] = [[] for _ in range(n)]
        for y, x in enumerate(self.pred):
            if x >= 0:
                self.next[x].append(y)
        self.delay = [self._delay(x) for x in range(n)]
        self.head = [0.0] * n  # earliest start of an act when nothing is in its way
        for x in self.order[1:]:
            a = self.pred[x]
            self.head[x] = self.head[a] + self.time[a] + self.delay[x]
        self.tail = [0.0] * n  # what must still follow after its end
        for x in reversed(self.order):
            for y in self.next[x]:
                self.tail[x] = max(self.tail[x], self.delay[y] + self.time[y] + self.tail[y])
        self.on = [[x for x in self.order if self.rank[x] == r] for r in range(self.num_ranks)]
        self.release = n // S - 1  # the op that frees the activation: B, or W when split
        # What makespans differ by at least.
        values = [*self.time, *self.delay]
        whole = all(float(v).is_integer() for v in values)
        self.unit = (gcd(*map(int, values)) or 1) if whole else 1e-9 * sum(self.time)

    def capped(self, caps: Sequence[int]) -> "Problem":
        """The same problem with other caps."""
        return Problem(self.rank_of_stage, self.num_microbatches, self.cost, self.split, caps)

    def _delay(self, x: int) -> float:
        """What the message from an act's predecessor takes."""
        a = self.pred[x]
        if a < 0 or self.rank[a] == self.rank[x]:
            return 0
        return _plain(self.cost.message(max(x % self.S, a % self.S)))


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
