"""Step 2: messages arrive right, or both ends say why not."""

import gc
import time

import pytest
import torch

from step0_monolith.options import RunError
from step2_comms.channel import MAX_SENDS_UNDER_WAY
from step2_comms.contract import Message, Spec, describe, from_json, same_layout, specs_of, to_json
from step2_comms.p2p import Messages, edges_of_a_line

LINE = edges_of_a_line(2)


def opened(world, there, back=()):
    """Messages between ranks 0 and 1: labels ahead and back, each with the tensors that it will carry."""
    messages = Messages(world, LINE)
    for channel, labelled in zip(
        (messages.channel("forward", 0, 1), messages.channel("backward", 1, 0)), (there, back), strict=True
    ):
        script = [Message(label, specs_of(tensors)) for label, tensors in labelled]
        channel.agree(script if channel.is_sender else None)
    return messages


def raised(world, function, *arguments):
    """The error that `function` raised on this rank, as text; raised in the pool it would cost the process."""
    try:
        function(world, *arguments)
    except RunError as error:
        return f"{type(error).__name__}: {error}"
    return None


def number(value):
    return (torch.full((2, 3), float(value)),)


# Layouts, dtypes, and the contract


def exchange(world, sent, agreed):
    """Rank 0 sends tensors under a contract made for others; returns what rank 1 received."""
    messages = opened(world, [("x", agreed)])
    if world.rank == 0:
        messages.send_forward("x", sent)
        return None
    return messages.recv_forward("x")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.zeros(0, 4),
        torch.tensor(3.5),
        torch.arange(5),
        torch.arange(6.0).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.float64),
    ],
    ids=["transposed", "strided", "empty", "scalar", "int64", "bfloat16", "bool", "float64"],
)
def test_any_layout_and_dtype_arrives(pool, tensor):
    _, (received,) = pool.run(2, exchange, (tensor,), (tensor,))
    assert received.dtype == tensor.dtype
    assert torch.equal(received, tensor)


def test_several_tensors_in_one_message(pool):
    sent = (torch.randn(2, 3), torch.arange(4), torch.zeros(0, 5), torch.tensor(True), torch.randn(1000, 300).t())
    _, received = pool.run(2, exchange, sent, sent)
    assert len(received) == len(sent)
    for theirs, mine in zip(received, sent, strict=True):
        assert theirs.dtype == mine.dtype
        assert torch.equal(theirs, mine)


@pytest.mark.parametrize(
    ("sent", "agreed", "words"),
    [
        (torch.zeros(4), torch.zeros(6), ["(4,)", "(6,)"]),
        (torch.zeros(6), torch.zeros(4), ["(4,)", "(6,)"]),
        (torch.zeros(2, 3), torch.zeros(3, 2), ["(2, 3)", "(3, 2)"]),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float16), ["bfloat16", "float16"]),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3), ["int32", "float32"]),
    ],
    ids=["shorter", "longer", "other shape", "bf16 as fp16", "int32 as fp32"],
)
def test_broken_contract_raises_on_both_ends(pool, sent, agreed, words):
    for error in pool.run(2, raised, exchange, (sent,), (agreed,)):
        assert "ContractError" in error
        assert all(word in error for word in words), error


def refused_and_alive(world):
    """Rank 0 lives on after its refusal, and waits until rank 1 has heard of it."""
    text = raised(world, exchange, (torch.zeros(4),), (torch.zeros(6),))
    if world.rank == 1:
        world.store.set("heard", "")
    world.store.wait(["heard"])
    return text


def test_the_peer_of_a_refusal_does_not_wait_for_the_end(pool):
    for error in pool.run(2, refused_and_alive, timeout=10):
        assert "(6,) float32, but rank 0 was about to send (4,)" in error


def test_wrong_number_of_tensors_raises_on_both_ends(pool):
    for error in pool.run(2, raised, exchange, (), number(1)):
        assert "agreed as (2, 3) float32, but rank 0 was about to send no tensor" in error


def test_script_survives_the_store():
    script = [
        Message("a", (Spec((2, 3), torch.bfloat16, True), Spec((), torch.int64))),
        Message("nothing", ()),
    ]
    assert from_json(to_json(script)) == script
    assert describe(script[0].specs) == "(2, 3) bfloat16 and () int64"
    assert same_layout(script[0].specs, (Spec((2, 3), torch.bfloat16), Spec((), torch.int64)))
    assert not same_layout(script[0].specs, script[0].specs[:1])


# Handles


def dropped_handles(world, late_rank):
    """All handles are dropped and nothing is closed; only the last message is looked at."""
    messages = opened(world, [(f"m{i}", number(i)) for i in range(4)])
    if world.rank == late_rank:
        time.sleep(0.5)
    for i in range(3):
        if world.rank == 0:
            messages.send_forward(f"m{i}", number(i), wait=False)
        else:
            messages.recv_forward(f"m{i}", wait=False)
        gc.collect()
    if world.rank == 0:
        messages.send_forward("m3", number(3), wait=False)
        return None
    return messages.recv_forward("m3")


@pytest.mark.parametrize("late_rank", [0, 1], ids=["slow sender", "slow receiver"])
def test_dropped_handles_lose_nothing(pool, late_rank):
    _, received = pool.run(2, dropped_handles, late_rank)
    assert torch.equal(*received, *number(3))


def waited_twice(world):
    messages = opened(world, [("x", number(7))])
    if world.rank == 0:
        handle = messages.send_forward("x", number(7), wait=False)
        return handle.wait() == handle.wait() == ()
    handle = messages.recv_forward("x", wait=False)
    (first,), (second,) = handle.wait(), handle.wait()
    messages.close()
    messages.close()
    return first is second and torch.equal(first, *number(7)) and handle.wait()[0] is first


def test_waiting_twice_gives_the_same_tensors(pool):
    assert pool.run(2, waited_twice) == [True, True]


def three_sends(world):
    """Returns on rank 1 whether the third send had been started while no receive was posted."""
    messages = opened(world, [(f"m{i}", number(i)) for i in range(3)])
    if world.rank == 0:
        for i in range(3):
            messages.send_forward(f"m{i}", number(i), wait=False)
            assert len(messages.channel("forward", 0, 1)._under_way) <= MAX_SENDS_UNDER_WAY
            world.store.set(f"started {i}", "")
        return None
    world.store.wait(["started 1"])
    time.sleep(0.5)
    third = world.store.check(["started 2"])
    return third, [messages.recv_forward(f"m{i}")[0][0, 0].item() for i in range(3)]


def test_at_most_two_sends_under_way(pool):
    assert pool.run(2, three_sends)[1] == (False, [0.0, 1.0, 2.0])


def waits_again_after_a_failure(world):
    messages = opened(world, [("x", number(1)), ("y", number(1))])
    if world.rank == 0:
        raise ValueError("planted")
    handles = [messages.recv_forward(label, wait=False) for label in "xy"]
    errors = []
    for handle in (handles[0], handles[0], handles[1]):
        try:
            handle.wait()
        except RuntimeError as error:
            errors.append(str(error))
    messages.flush()  # waits for nothing any more
    return errors


def test_a_failed_handle_fails_again(pool):
    outcome = pool.outcomes(2, waits_again_after_a_failure)[1]
    first, again, other = outcome.value
    assert "rank 0 failed: ValueError: planted" in first
    assert first == again == other


# Receiving into tensors that are there


def receives_into_one_place(world):
    messages = opened(world, [("a", number(0)), ("b", number(0))])
    channel = messages.channel("forward", 0, 1)
    if world.rank == 0:
        return [channel.send(label, number(value)).wait() for label, value in (("a", 1), ("b", 2))]
    place = torch.zeros(2, 3)
    found = []
    for label in "ab":
        (received,) = channel.receive(label, into=(place,)).wait()
        found.append((received is place, received.tolist()))
    return found


def test_messages_are_received_into_one_place_again_and_again(pool):
    _, found = pool.run(2, receives_into_one_place)
    assert found == [(True, [[value] * 3] * 2) for value in (1.0, 2.0)]


def receives_into(world, place):
    messages = opened(world, [("a", number(0))])
    channel = messages.channel("forward", 0, 1)
    if world.rank == 0:
        channel.send("a", number(1)).wait()
    else:
        channel.receive("a", into=(place,)).wait()


@pytest.mark.parametrize(
    "place",
    [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2).t()],
    ids=["shape", "dtype", "not contiguous"],
)
def test_a_place_that_does_not_fit_is_refused_on_both_ends(pool, place):
    words = "forward 0 to 1: a was agreed as (2, 3) float32, but rank 1 was about to receive into "
    for error in pool.run(2, raised, receives_into, place):
        assert words in error


# Order, labels, passes


def other_order(world):
    messages = opened(world, [("a", number(1)), ("b", number(2))])
    if world.rank == 0:
        messages.send_forward("a", number(1))
        return
    messages.recv_forward("b")


def test_receiving_in_another_order_is_refused(pool):
    for error in pool.run(2, raised, other_order):
        assert "forward 0 to 1: rank 1 comes with b, but it is the turn of a" in error


def wrong_label(world):
    messages = opened(world, [("microbatch 0", number(1)), ("microbatch 1", number(2))])
    if world.rank == 0:
        messages.send_forward("microbatch 0", number(1))
        messages.send_forward("microbatch 2", number(2))
        return
    messages.recv_forward("microbatch 0")
    messages.recv_forward("microbatch 1")


def test_sending_another_microbatch_is_refused(pool):
    for error in pool.run(2, raised, wrong_label):
        assert "rank 0 comes with microbatch 2, but it is the turn of microbatch 1" in error


def disagree(world, theirs, mine):
    messages = Messages(world, LINE)
    channel = messages.channel("forward", 0, 1)
    channel.agree(theirs if world.rank == 0 else mine)
    if world.rank == 0:
        for message in theirs:
            messages.send_forward(message.label, [torch.zeros(s.shape, dtype=s.dtype) for s in message.specs])


X = Message("x", (Spec((2,), torch.float32),))


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ([X._replace(label="y")], "rank 0 sends x with (2,) float32, but rank 1 expects y with (2,) float32"),
        ([Message("x", (Spec((3,), torch.float32),))], "(2,) float32, but rank 1 expects x with (3,) float32"),
        ([Message("x", (Spec((2,), torch.float64),))], "(2,) float32, but rank 1 expects x with (2,) float64"),
        ([X, X], "rank 0 sends 1 messages, rank 1 expects 2"),
    ],
    ids=["label", "shape", "dtype", "number"],
)
def test_ends_that_disagree_both_raise(pool, mine, words):
    for error in pool.run(2, raised, disagree, [X], mine):
        assert "ContractError" in error
        assert words in error


def no_agreement(world):
    messages = Messages(world, LINE)
    if world.rank == 0:
        messages.send_forward("x", number(1))
    else:
        messages.recv_forward("x")


def test_messages_without_an_agreement_are_refused(pool):
    for error in pool.run(2, raised, no_agreement):
        assert "forward 0 to 1: no message was agreed on; both ends call agree() first" in error


def passes(world):
    """Uneven microbatches, an evaluation between two iterations, and then a batch of another size."""
    messages = Messages(world, LINE)
    channel = messages.channel("forward", 0, 1)
    received = []

    def agree(name, sizes):
        script = [Message(f"{name} {m}", (Spec((rows, 2), torch.float32),)) for m, rows in enumerate(sizes)]
        channel.agree(script if world.rank == 0 else None, name)

    def run(name, sizes):
        messages.begin(name)
        for m, rows in enumerate(sizes):
            if world.rank == 0:
                messages.send_forward(f"{name} {m}", (torch.full((rows, 2), float(m)),), wait=False)
            else:
                received.append(tuple(messages.recv_forward(f"{name} {m}")[0].shape))

    agree("train", [3, 3, 2, 0])
    agree("evaluate", [5])
    run("train", [3, 3, 2, 0])
    run("evaluate", [5])
    run("train", [3, 3, 2, 0])
    agree("train", [1, 1])
    run("train", [1, 1])
    run("evaluate", [5])
    return received


def test_uneven_microbatches_other_passes_and_changed_contracts(pool):
    rows = [3, 3, 2, 0, 5, 3, 3, 2, 0, 1, 1, 5]
    assert pool.run(2, passes)[1] == [(n, 2) for n in rows]


def open_again(world):
    """A second set of channels in the same world knows nothing of the first one's contracts."""
    received = []
    for shape in ((2,), (5,)):
        x = (torch.ones(shape),)
        messages = Messages(world, LINE)
        if world.rank == 0:
            time.sleep(0.2)  # the receiver asks for the contract first
        messages.channel("forward", 0, 1).agree([Message("x", specs_of(x))] if world.rank == 0 else None)
        if world.rank == 0:
            messages.send_forward("x", x)
        else:
            received.append(tuple(messages.recv_forward("x")[0].shape))
        messages.close()
    return received


def test_channels_opened_again(pool):
    assert pool.run(2, open_again)[1] == [(2,), (5,)]


def used_after_close(world):
    messages = opened(world, [("x", number(1))])
    messages.close()
    if world.rank == 0:
        messages.send_forward("x", number(1))


def test_a_closed_channel_is_refused(pool):
    assert pool.run(2, raised, used_after_close) == ["ContractError: forward 0 to 1: the channel is closed", None]


# Directions, gradients, bytes


def pending_receive(world):
    """Rank 1 waits for a forward message that rank 0 sends only after it has received a backward one."""
    messages = opened(world, [("x", number(1))], [("g", number(2))])
    ahead, back = messages.channel("forward", 0, 1), messages.channel("backward", 1, 0)
    assert ahead._group.group_name != back._group.group_name
    if world.rank == 0:
        (gradient,) = messages.recv_backward("g")
        messages.send_forward("x", number(1))
        return gradient
    handle = messages.recv_forward("x", wait=False)
    messages.send_backward("g", number(2))
    return handle.wait()[0]


def test_directions_do_not_block_each_other(pool):
    gradient, activation = pool.run(2, pending_receive)
    assert torch.equal(gradient, *number(2))
    assert torch.equal(activation, *number(1))


def both_send_first(world):
    """Both start a large send before either receives."""
    large = torch.arange(1_000_000.0)
    messages = opened(world, [("x", (large,))], [("g", (large,))])
    if world.rank == 0:
        messages.send_forward("x", (large,), wait=False)
        (received,) = messages.recv_backward("g")
    else:
        messages.send_backward("g", (large,), wait=False)
        (received,) = messages.recv_forward("x")
    return torch.equal(received, large), messages.bytes_sent


def test_large_messages_cross(pool):
    assert pool.run(2, both_send_first) == [(True, 4_000_000)] * 2


def ring(world):
    """Every rank sends to the next one, the last one to rank 0, as a rank with several chunks does; twice."""
    edges = [("forward", rank, (rank + 1) % world.size) for rank in range(world.size)]
    messages = Messages(world, edges)
    ahead, behind = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    tensors = (torch.full((3,), float(world.rank)), torch.ones(2, dtype=torch.int64))
    for edge in sorted(edges):
        if world.rank in edge[1:]:
            channel = messages.channel(*edge)
            channel.agree([Message("x", specs_of(tensors))] if channel.is_sender else None)
    for _ in range(2):
        messages.send_forward("x", tensors, wait=False, peer=ahead)
        (received, _) = messages.recv_forward("x", peer=behind)
    messages.close()
    return int(received[0]), messages.bytes_sent


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_ring_of_ranks_and_the_bytes_it_sends(pool, num_ranks):
    expected = [((rank - 1) % num_ranks, 2 * (3 * 4 + 2 * 8)) for rank in range(num_ranks)]
    assert pool.run(num_ranks, ring) == expected


def received_flags(world):
    floats, integers = torch.ones(2, requires_grad=True), torch.arange(2)
    messages = opened(world, [("x", (floats, integers, torch.ones(2)))])
    if world.rank == 0:
        messages.send_forward("x", (floats * 2, integers, torch.ones(2)))
        return None
    return [(x.requires_grad, x.is_leaf) for x in messages.recv_forward("x")]


def test_the_contract_says_what_needs_a_gradient(pool):
    assert pool.run(2, received_flags)[1] == [(True, True), (False, True), (False, True)]


def test_edges_of_a_line():
    assert edges_of_a_line(1) == []
    assert edges_of_a_line(3) == [("forward", 0, 1), ("backward", 1, 0), ("forward", 1, 2), ("backward", 2, 1)]
