"""Whose clock shows what: the difference between a rank's clock and rank 0's, measured by messages there and back."""

import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from step2_comms.world import World

ROUND_TRIPS = 16
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Reading(NamedTuple):
    """What one comparison found, in seconds of this rank's clock.

    at: when. offset: this rank's clock minus rank 0's. error: the offset is that far off at most.
    """

    at: float
    offset: float
    error: float


class Clock:
    """This rank's times in those of rank 0's clock, from a comparison before and one after.

    Between and beyond the two, the clocks are taken to drift apart evenly.
    """

    def __init__(self, first: Reading, last: Reading) -> None:
        self.first, self.last = first, last

    @property
    def error(self) -> float:
        """Seconds that a time between the two comparisons is off at most, if the drift was even."""
        return max(self.first.error, self.last.error)

    def aligned(self, moment: float) -> float:
        """A moment of this rank's clock as rank 0's clock shows it."""
        first, last = self.first, self.last
        if last.at <= first.at:
            return moment - last.offset
        share = (moment - first.at) / (last.at - first.at)
        return moment - (first.offset + share * (last.offset - first.offset))


def compare_clocks(world: World) -> Reading:
    """Compares `time.perf_counter` of every rank with rank 0's; called on every rank, each takes its turn.

    A message leaves rank 0 at t0, the other rank answers with its own time t, and the answer is back at t1: its clock
    showed t somewhere between t0 and t1. The quickest of 16 round trips is taken, and its middle; the error is half of
    it. Where a difference of 0 lies within the error and both ranks are on one host, they read one clock, and the
    offset is 0 without error. Raises RunError when a rank is lost.
    """
    hosts = world.gather_everywhere(_host())
    if world.rank > 0:
        return _answer(world, hosts[0])
    for rank in range(1, world.size):
        _ask(world, rank)
    return Reading(time.perf_counter(), 0.0, 0.0)


def _ask(world: World, rank: int) -> None:
    peer = world.ranks[rank]
    there, back = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    best = Reading(0.0, 0.0, float("inf"))
    with world.watch.waiting(f"comparing clocks with rank {peer}", peer):
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            dist.send(there, peer, group=world.group)
            dist.recv(back, peer, group=world.group)
            half = (time.perf_counter() - start) / 2
            if half < best.error:
                best = Reading(back.item(), back.item() - (start + half), half)
        dist.send(torch.tensor(best, dtype=torch.float64), peer, group=world.group)


def _answer(world: World, host_of_0: str) -> Reading:
    origin = world.ranks[0]
    buffer, found = torch.zeros(1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    with world.watch.waiting(f"comparing clocks with rank {origin}", origin):
        for _ in range(ROUND_TRIPS):
            dist.recv(buffer, origin, group=world.group)
            buffer[0] = time.perf_counter()
            dist.send(buffer, origin, group=world.group)
        dist.recv(found, origin, group=world.group)
    reading = Reading(*found.tolist())
    if abs(reading.offset) <= reading.error and _host() == host_of_0:
        return Reading(reading.at, 0.0, 0.0)
    return reading


def _host() -> str:
    """The same on ranks that may read one clock: the host, since it was started."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{platform.node()} {boot}"
