"""Step 2: messages that travel slowly, for emulation."""

import time

import pytest
import torch

from step0_monolith.options import RunError
from step2_comms.contract import Message, specs_of
from step2_comms.late import LateSends
from step2_comms.p2p import Messages

EDGE = [("forward", 0, 1)]
TRAVEL = 0.15


def opened(world, count, travel):
    messages = Messages(world, EDGE, travel)
    script = [Message(f"x{i}", specs_of((torch.zeros(3),))) for i in range(count)]
    messages.channel(*EDGE[0]).agree(script if world.rank == 0 else None)
    return messages


def stream(world, count, travel):
    """Rank 0 sends everything before rank 1 posts its first receive."""
    messages = opened(world, count, travel)
    key = world.new_key("all sent")
    if world.rank == 0:
        for i in range(count):
            messages.send_forward(f"x{i}", (torch.full((3,), float(i)),), wait=False)
        world.store.set(key, "yes")
        messages.flush()
        return messages.bytes_sent
    world.fetch(key, "the word that all is sent", 0)
    return [messages.recv_forward(f"x{i}")[0].tolist() for i in range(count)]


def test_late_messages_do_not_hold_up_their_sender_and_keep_their_order(pool):
    sent, received = pool.run(2, stream, 6, TRAVEL)
    assert received == [[float(i)] * 3 for i in range(6)]
    assert sent == 6 * 3 * 4


def when(world, travel):
    """Seconds on one clock from before the send to after the receive."""
    messages = opened(world, 1, travel)
    key = world.new_key("sent at")
    if world.rank == 0:
        world.store.set(key, repr(time.perf_counter()))
        messages.send_forward("x0", (torch.zeros(3),))
        return None
    messages.recv_forward("x0")
    return time.perf_counter() - float(world.fetch(key, "the time of the send", 0))


def test_a_late_message_takes_at_least_its_time(pool):
    _, seconds = pool.run(2, when, TRAVEL)
    assert seconds >= TRAVEL


def lose_the_peer(world):
    messages = opened(world, 1, TRAVEL)
    if world.rank == 1:
        raise ValueError("rank 1 stops here")
    messages.send_forward("x0", (torch.zeros(3),))


def test_a_late_send_to_a_lost_peer_names_it(pool):
    outcomes = pool.outcomes(2, lose_the_peer, timeout=5)
    assert outcomes[0].error.startswith("RunError")
    assert "rank 1 stops here" in outcomes[0].error


def test_what_posting_raises_comes_out_of_wait():
    def fails():
        raise RunError("no such peer")

    late = LateSends(0.0)
    with pytest.raises(RunError, match="no such peer"):
        late.post(fails).wait()
    late.close()
