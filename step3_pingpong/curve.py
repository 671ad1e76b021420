"""What a message costs, by its size: step 2's channels against bare torch.distributed calls, in the same run."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from step2_comms.contract import Message, specs_of
from step2_comms.p2p import Messages
from step2_comms.world import World
from step3_pingpong.round_trip import check_equal

SMALLEST = 4  # bytes: one int32
SMALL = 4096  # bytes up to which a message is taken to cost latency alone
GROWTH = 4
WARM_UP = 2  # rounds of each size that are not counted


class Point(NamedTuple):
    """Seconds that a message of `num_bytes` takes one way: through step 2's channels, and with bare send and recv."""

    num_bytes: int
    ours: float
    bare: float


class Fit(NamedTuple):
    """seconds = latency (seconds) + bytes / bandwidth (bytes a second)."""

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: int) -> float:
        """Predicted seconds of a message, one way."""
        return self.latency + num_bytes / self.bandwidth


def sizes(max_bytes: int) -> list[int]:
    """4 B, 16 B, 64 B, ... up to the last one that is not above `max_bytes`."""
    found = [SMALLEST]
    while found[-1] * GROWTH <= max_bytes:
        found.append(found[-1] * GROWTH)
    return found


def rounds_for(num_bytes: int) -> int:
    """Counted round trips of one size: 100 of a small message, down to 3 of the largest, which takes the longest."""
    return max(3, min(100, 2**26 // num_bytes))


def measure(world: World, messages: Messages, max_bytes: int) -> list[Point] | None:
    """The curve, on rank 0; None on rank 1, which sends everything back.

    A point is half the median round trip. Rounds of the two ways take turns, so that a disturbance of the machine hits
    both. Each message holds other values than the one before, and both ranks check every value, outside the clock.
    Raises RunError for a wrong value.
    """
    with bare_group(world) as group:
        points = [
            Point(size, *map(statistics.median, round_trips(world, messages, group, size, rounds_for(size))))
            for size in sizes(max_bytes)
        ]
    return points if world.rank == 0 else None


@contextlib.contextmanager
def bare_group(world: World) -> Iterator[dist.ProcessGroup]:
    """The communicator of the bare calls; opened and closed on both ranks."""
    # One of its own: messages of the two ways cannot wait behind each other.
    with world.watch.waiting("opening the group of the bare calls", 1 - world.rank):
        group = dist.new_group([0, 1], timeout=world.timeout)
    yield group
    _meet(world)  # nobody closes the group under the other's last message
    dist.destroy_process_group(group)


def round_trips(
    world: World, messages: Messages, group: dist.ProcessGroup, num_bytes: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Half the seconds of each counted round trip of one size, ours and bare, in the order of the rounds.

    group: of the bare calls. Called on both ranks, rank 0's seconds are the ones of interest. Raises RunError for a
    wrong value.
    """
    # Where messages of a GPU are staged through the host's memory, gloo itself can only send from there.
    bare_device = torch.device("cpu") if world.is_staged else world.device
    ways = (_through_channels(messages, num_bytes), _bare(world, group, num_bytes, bare_device))
    devices = (world.device, bare_device)
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_ in range(WARM_UP + rounds):
        for way in (0, 1) if round_ % 2 == 0 else (1, 0):
            payload = _payload(num_bytes, 2 * round_ + way, devices[way])
            _meet(world)
            with world.watch.waiting(f"a round trip of {num_bytes} B", 1 - world.rank):
                taken, received = _round(world, *ways[way], payload)
            check_equal(f"{num_bytes} B, round {round_}, on rank {world.rank}", payload, received)
            if round_ >= WARM_UP:
                seconds[way].append(taken / 2)
    return seconds


Send, Receive = Callable[[Tensor], None], Callable[[], Tensor]


def _round(world: World, send: Send, receive: Receive, payload: Tensor) -> tuple[float, Tensor]:
    """One message there and back: seconds (of interest on rank 0) and what this rank received."""
    _synchronize(world)
    start = time.perf_counter()
    if world.rank == 0:
        send(payload)
        received = receive()
    else:
        received = receive()
        send(received)
    _synchronize(world)
    return time.perf_counter() - start, received


def _through_channels(messages: Messages, num_bytes: int) -> tuple[Send, Receive]:
    """One buffer for every message, as below: pages that are new cost as much as their message."""
    label = f"{num_bytes} B"
    buffer = _payload(num_bytes, 0, messages.world.device)
    script = [Message(label, specs_of([buffer]))]
    out, back = messages.channel("forward", 0, 1), messages.channel("backward", 1, 0)
    out.agree(script, label)
    back.agree(script, label)
    messages.begin(label)
    if messages.world.rank == 1:
        out, back = back, out
    return (lambda tensor: out.send(label, (tensor,)).wait()), (lambda: back.receive(label, (buffer,)).wait()[0])


def _bare(world: World, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> tuple[Send, Receive]:
    """What a program without step 2 would do: one buffer, used for every message."""
    peer = 1 - world.rank
    buffer = _payload(num_bytes, 0, device)

    def send(tensor: Tensor) -> None:
        dist.send(tensor, peer, group=group)

    def receive() -> Tensor:
        dist.recv(buffer, peer, group=group)
        return buffer

    return send, receive


def _meet(world: World) -> None:
    """Returns when both ranks are here, so that no clock runs while the other rank still checks values."""
    token, peer = torch.zeros(1), 1 - world.rank
    with world.watch.waiting(f"the start of a round with rank {peer}", peer):
        (dist.recv if world.rank == 0 else dist.send)(token, peer)


def _payload(num_bytes: int, number: int, device: torch.device) -> Tensor:
    """Message `number` of a size: int32, because whole numbers stay exact up to the largest message."""
    return torch.arange(number, number + num_bytes // 4, dtype=torch.int32, device=device)


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def fit(points: list[Point]) -> Fit | None:
    """What the link itself costs, from the bare calls: latency from small messages, bandwidth from the largest one.

    All sizes between are left to predict. The latency is the median up to 4 KiB, which one disturbed point does not
    move. None where the largest message is not large enough, or too noisy, to give a bandwidth.
    """
    latency = statistics.median(point.bare for point in points if point.num_bytes <= SMALL)
    largest = points[-1]
    if largest.num_bytes <= SMALL or largest.bare <= latency:
        return None
    return Fit(latency, largest.num_bytes / (largest.bare - latency))
