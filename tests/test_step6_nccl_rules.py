"""NCCL's rules on the CPU: each rule by itself, then every schedule under them, and what breaks under them."""

import re
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from step0_monolith.options import RunError
from step5_orchestrator import pipeline
from step5_orchestrator.executor import Executor
from step5_orchestrator.lowering import Receive, lower
from step5_orchestrator.table import TableError
from step5_orchestrator.trainer import Trainer
from step6_schedules import break_it
from step6_schedules.schedules import SCHEDULES
from tests.monolith import small
from tests.nccl_rules import Operation, nccl_rules, under_nccl_rules
from tests.ranks import python, torchrun
from tests.test_step2_messages import number, opened, refused_and_alive
from tests.training import Job, assert_equals_monolith, train_jobs

TIMEOUT = 3
A_MOMENT = 0.3  # what must not happen gets this long to happen


def run(pool, rules, num_ranks, function, *arguments, **limits):
    """The ranks' values, under NCCL's rules or under plain gloo."""
    wrapped = (under_nccl_rules, function) if rules else (function,)
    return pool.run(num_ranks, *wrapped, *arguments, **limits)


def errors_of(world, function, *arguments):
    """The RunError of this rank as text, or None; the rank stays until all have theirs, as under one launcher."""
    try:
        function(world, *arguments)
        text = None
    except RunError as error:
        text = f"{type(error).__name__}: {error}"
    stay(world)
    return text


def stay(world):
    """Returns when all ranks have come here; has no timeout of its own."""
    key = world.new_key("stay")
    world.store.add(key, 1)
    while world.store.add(key, 0) < world.size:
        time.sleep(0.05)


def group_of_two(world):
    return dist.new_group([0, 1], timeout=world.timeout)


def ends_soon(operation):
    deadline = time.monotonic() + 20
    while not operation.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    return operation.is_completed()


def threads_of_the_rules():
    return [thread.name for thread in threading.enumerate() if thread.name == "nccl_rules"]


# Rule 1 and 2: one queue a communicator; a send is done when its receive has started


def sends_before_receives(world, num_floats):
    """Rank 0 posts two sends; returns which of them were done while rank 1 had posted 0, 1 and 2 receives."""
    group, other = group_of_two(world), group_of_two(world)
    tensors = [torch.full((num_floats,), float(i)) for i in range(2)]
    if world.rank == 1:
        received = [torch.zeros(num_floats) for _ in tensors]
        dist.irecv(torch.zeros(1), 0, group=other).wait()
        for i, tensor in enumerate(received):
            world.store.wait([f"looked {i}"])
            dist.irecv(tensor, 0, group=group).wait()
        return all(map(torch.equal, received, tensors))
    works = [dist.isend(tensor, 1, group=group) for tensor in tensors]
    dist.isend(torch.zeros(1), 1, group=other).wait()  # another communicator is not held up
    seen = []
    for i in range(2):
        time.sleep(A_MOMENT)
        seen.append([work.is_completed() for work in works])
        world.store.set(f"looked {i}", "")
        assert ends_soon(works[i])
    return seen


@pytest.mark.parametrize("num_floats", [0, 10, 1_000_000])
def test_a_send_is_done_when_its_receive_is_posted_and_not_before(pool, num_floats):
    seen, arrived = run(pool, True, 2, sends_before_receives, num_floats)
    assert seen == [[False, False], [True, False]]
    assert arrived


def both_ways(world):
    """Both ranks post a send and then a receive on one communicator; returns what is done a bit later."""
    group, peer = group_of_two(world), 1 - world.rank
    incoming = torch.zeros(2)
    works = dist.isend(torch.full((2,), float(world.rank)), peer, group=group), dist.irecv(incoming, peer, group=group)
    stay(world)
    time.sleep(A_MOMENT)
    done = [work.is_completed() for work in works]
    stay(world)
    if isinstance(works[0], Operation):
        return done
    for work in works:
        work.wait()
    return incoming[0].item()


def test_both_directions_of_a_communicator_share_a_queue(pool):
    assert run(pool, False, 2, both_ways) == [1.0, 0.0]
    assert run(pool, True, 2, both_ways) == [[False, False]] * 2


def out_of_order(world):
    """Rank 0 posts the receive of an answer before the question that it answers."""
    group = group_of_two(world)
    question, answer = torch.ones(2), torch.ones(2)
    if world.rank == 0:
        waits = [("the answer", dist.irecv(answer, 1, group=group))]
        waits.insert(0, ("asking", dist.isend(question, 1, group=group)))
    else:
        waits = [("the question", dist.irecv(question, 0, group=group))]
    for call, work in waits:
        with world.watch.waiting(call, 1 - world.rank):
            work.wait()
    if world.rank == 1:
        with world.watch.waiting("answering", 0):
            dist.isend(answer, 0, group=group).wait()


def test_an_operation_out_of_order_blocks_those_behind_it_and_is_named(pool):
    run(pool, False, 2, out_of_order)
    for error in run(pool, True, 2, errors_of, out_of_order, timeout=TIMEOUT):
        assert "deadlock: rank 0 waits in asking, rank 1 waits in the question" in error


# Rule 3: posting order, never tags


def tags_crossed(world):
    group = group_of_two(world)
    if world.rank == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, group=group, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
        return None
    values = []
    for tag in (2, 1):
        tensor = torch.zeros(2)
        dist.irecv(tensor, 0, group=group, tag=tag).wait()
        values.append(tensor[0].item())
    return values


def test_values_arrive_in_posting_order_and_never_by_tag(pool):
    assert run(pool, False, 2, tags_crossed)[1] == [2.0, 1.0]
    assert run(pool, True, 2, tags_crossed)[1] == [1.0, 2.0]


# Rule 4: no wait is needed, and a second does no harm


def nobody_waits(world):
    group = group_of_two(world)
    tensor = torch.full((3,), float(1 - world.rank))
    post = dist.isend if world.rank == 0 else dist.irecv
    works = [post(tensor, 1 - world.rank, group=group) for _ in range(3)]
    ended = ends_soon(works[-1])
    return ended, tensor.tolist(), works[0].wait() == works[0].wait() == works[2].wait() is True


def test_messages_arrive_without_a_wait_and_waiting_twice_is_harmless(pool):
    assert run(pool, True, 2, nobody_waits) == [(True, [1.0] * 3, True)] * 2


# Rule 5: the timeout


def nobody_sends(world):
    """Rank 0 receives twice what nobody sends; returns the errors, and what became of a message posted afterwards."""
    if world.rank == 1:
        group_of_two(world)
        stay(world)
        return None
    group = group_of_two(world)
    works = [dist.irecv(torch.zeros(2), 1, group=group) for _ in range(2)]
    assert all(map(ends_soon, works))  # with nobody waiting
    works.append(dist.irecv(torch.zeros(2), 1, group=group))
    texts = []
    for work in (*works, works[0]):
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms") as raised:
            work.wait()
        texts.append(str(raised.value))
    stay(world)
    return texts


def test_the_timeout_runs_while_nobody_waits_and_fails_all_behind(pool):
    texts, _ = run(pool, True, 2, nobody_sends, timeout=1)
    assert len(texts) == 4
    assert len(set(texts)) == 1


# Rule 6: closing, failures, threads


def closed_under_way(world, rank):
    """Rank `rank` closes while its message is under way; the other then comes, and both live on."""
    messages = opened(world, [("x", number(1)), ("y", number(2))])
    channel = messages.channel("forward", 0, 1)
    act = channel.receive if world.rank == 1 else lambda label: channel.send(label, number(1))
    if world.rank == rank:
        act("x"), act("y")
        time.sleep(A_MOMENT)
        before = len(threads_of_the_rules())
        channel.close()
        world.store.set("closed", "")
        world.store.wait(["heard"])
        return before, threads_of_the_rules()
    world.store.wait(["closed"])
    with pytest.raises(RunError) as raised:
        act("x").wait()
    world.store.set("heard", "")
    return str(raised.value)


@pytest.mark.parametrize("rank", [0, 1], ids=["sender", "receiver"])
def test_closing_breaks_off_what_is_under_way_on_both_ranks(pool, rank):
    values = run(pool, True, 2, closed_under_way, rank)
    assert values[rank] == (1, [])
    assert "lost its peer" in values[1 - rank]


def test_a_refusal_ends_the_wait_of_the_peer(pool):
    for error in run(pool, True, 2, refused_and_alive, timeout=10):
        assert "(6,) float32, but rank 0 was about to send (4,)" in error


def fails_in_the_middle(world):
    """Rank 1 fails while rank 0 waits for it and has a send under way."""
    messages = opened(world, [("x", number(1))], [("g", number(1))])
    if world.rank == 1:
        messages.recv_forward("x", wait=False)
        raise ValueError("planted")
    messages.send_forward("x", number(1), wait=False)
    messages.recv_backward("g")


def test_a_failed_peer_is_named(pool):
    outcomes = pool.outcomes(2, under_nccl_rules, fails_in_the_middle, limit=20)
    assert "rank 1 failed: ValueError: planted" in outcomes[0].error
    assert outcomes[1].error == "ValueError: planted"


def left_open(world):
    """Leaves the rules with a message under way that nobody has waited for, and with its channel open."""
    with nccl_rules():
        messages = opened(world, [("x", number(3))])
        if world.rank == 0:
            messages.send_forward("x", number(3), wait=False)
            return None
        handle = messages.recv_forward("x", wait=False)
    return handle.wait()[0][0, 0].item()


def what_is_left(world):
    names = ("isend", "irecv", "destroy_process_group")
    return threads_of_the_rules(), {getattr(dist, name).__module__ for name in names}


def test_nothing_of_the_rules_is_left_after_a_job(pool):
    assert pool.run(2, left_open) == [None, 3.0]
    assert pool.run(2, what_is_left) == [([], {"torch.distributed.distributed_c10d"})] * 2


# Rule 7: what is refused


def refused(world):
    group = group_of_two(world)
    with pytest.raises(ValueError, match="not from any"):
        dist.irecv(torch.zeros(2), group=group)
    with pytest.raises(ValueError, match="contiguous"):
        dist.isend(torch.zeros(2, 3).t(), 1 - world.rank, group=group)
    with pytest.raises(RuntimeError, match="already in force"), nccl_rules():
        pass
    dist.destroy_process_group(group)
    with pytest.raises(ValueError):
        dist.isend(torch.zeros(2), 1 - world.rank, group=group)


def test_what_nccl_refuses(pool):
    run(pool, True, 2, refused)


# Every schedule


def jobs_under_the_rules(num_ranks, names, microbatches):
    """All of `names` with all numbers of microbatches that they admit, on so many layers that no stage is empty."""
    jobs = []
    for name in names:
        for m in microbatches:
            try:
                SCHEDULES[name](num_ranks, m)
            except TableError:
                assert name == "dualpipe-v"
                assert m < 2 * num_ranks
                continue
            jobs.append(Job(small(num_layers=17, batch_size=17, num_microbatches=m, num_iterations=2), name))
    return jobs


def train_and_compare(pool, num_ranks, jobs, limit):
    assert jobs
    results = run(pool, True, num_ranks, train_jobs, jobs, limit=limit)
    for index, job in enumerate(jobs):
        assert_equals_monolith([ranks[index] for ranks in results], job)


@pytest.mark.parametrize(("num_ranks", "microbatches"), [(2, (4,)), (4, (5,))])
def test_schedules_train_under_the_rules(pool, num_ranks, microbatches):
    train_and_compare(pool, num_ranks, jobs_under_the_rules(num_ranks, SCHEDULES, microbatches), limit=60)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_all_schedules_train_under_the_rules(pool, num_ranks, schedule):
    jobs = jobs_under_the_rules(num_ranks, [schedule], sorted({1, 2, 3, 5, 8, 2 * num_ranks}))
    train_and_compare(pool, num_ranks, jobs, limit=300)


# What breaks under them


SEND = Executor._send


def send_and_wait(executor, *prepared):
    """In the place of Executor._send: a send that blocks until it is done."""
    SEND(executor, *prepared)
    executor._messages.flush()


def train_blocking(world, jobs):
    """Every message is waited for at once, in the order that the lowering gave."""
    with (
        mock.patch.object(Executor, "_send", send_and_wait),
        mock.patch("step5_orchestrator.executor.post_ahead", lambda row, *_: list(row)),
    ):
        return train_jobs(world, jobs)


@pytest.mark.parametrize(
    ("num_ranks", "microbatches"),
    [
        (3, (6,)),
        pytest.param(2, (1, 2, 3, 4, 5), marks=pytest.mark.slow),
        pytest.param(4, (3, 8), marks=pytest.mark.slow),
        pytest.param(8, (5, 16), marks=pytest.mark.slow),
    ],
)
def test_blocking_messages_finish_in_the_lowered_order(pool, num_ranks, microbatches):
    jobs = jobs_under_the_rules(num_ranks, SCHEDULES, microbatches)
    results = run(pool, True, num_ranks, train_blocking, jobs, limit=100)
    for index, job in enumerate(jobs):
        assert_equals_monolith([ranks[index] for ranks in results], job)


def train_with_late_receives(world, schedule):
    """As the lesson's break_it."""
    trainer = Trainer(small(num_microbatches=3), world, SCHEDULES[schedule](world.size, 3))
    break_it.block(trainer.pipeline.executor)
    trainer.train()
    trainer.close()


def test_blocking_1f1b_with_late_receives_deadlocks_and_the_others_finish(pool):
    for schedule in ("naive", "gpipe"):
        run(pool, True, 2, train_with_late_receives, schedule)
    for error in run(pool, True, 2, errors_of, train_with_late_receives, "1f1b", timeout=TIMEOUT):
        assert (
            "deadlock: rank 0 waits in send_forward to rank 1 (activation 1 of microbatch 1), "
            "rank 1 waits in send_backward to rank 0 (gradient 1 of microbatch 0)"
        ) in error


def swapped(row):
    """The row with its first two receives of one edge swapped."""
    first, second = [i for i, instruction in enumerate(row) if isinstance(instruction, Receive)][:2]
    assert (row[first].peer, row[first].value.kind) == (row[second].peer, row[second].value.kind)
    row = list(row)
    row[first], row[second] = row[second], row[first]
    return row


def train_with_swapped_receives(world, is_agreed):
    """Rank 1 swaps two receives before the channels agree on their messages, or after."""
    trainer = None

    def lower_and_swap(table):
        rows = lower(table)
        return [swapped(row) if rank == 1 and table.name == "gpipe" else row for rank, row in enumerate(rows)]

    with mock.patch.object(pipeline, "lower", lower if is_agreed else lower_and_swap):
        trainer = Trainer(small(num_microbatches=3), world, SCHEDULES["gpipe"](world.size, 3))
    if world.rank == 1:
        trainer.pipeline.executor.row = swapped(trainer.pipeline.executor.row)
    trainer.step()


@pytest.mark.parametrize(
    ("is_agreed", "words"),
    [
        (False, "forward 0 to 1: rank 0 sends activation 1 of microbatch 0 with"),
        (True, "rank 1 comes with activation 1 of microbatch 1, but it is the turn of activation 1 of microbatch 0"),
    ],
    ids=["before the agreement", "after it"],
)
def test_swapped_receives_are_refused_on_both_ranks(pool, is_agreed, words):
    for error in run(pool, True, 2, errors_of, train_with_swapped_receives, is_agreed):
        assert "ContractError" in error
        assert words in error


def train_on_shared_communicators(world):
    """The planted error: the two directions of a pair share one communicator."""
    groups, new_group = {}, dist.new_group

    def one_a_pair(members, timeout):
        if tuple(members) not in groups:
            groups[tuple(members)] = new_group(members, timeout=timeout)
        return groups[tuple(members)]

    with mock.patch.object(dist, "new_group", one_a_pair):
        trainer = Trainer(small(num_microbatches=3), world, SCHEDULES["1f1b"](world.size, 3))
    try:
        trainer.train()
    finally:
        for channel in trainer.pipeline.messages._channels.values():
            channel._group = None  # a group of two channels would be closed twice; open_world closes it


@pytest.mark.slow
def test_two_directions_on_one_communicator_run_on_gloo_and_deadlock_under_the_rules(pool):
    run(pool, False, 2, train_on_shared_communicators)
    for error in run(pool, True, 2, errors_of, train_on_shared_communicators, timeout=TIMEOUT):
        assert "deadlock: rank 0 waits in recv_backward from rank 1 (gradient 1 of microbatch 0), rank 1 waits" in error


# Whole programs


@pytest.mark.slow
def test_programs_run_under_the_rules():
    sizes = ("--num-iterations", 3, "--num-microbatches", 3, "--width", 16)
    plain = python("step0_monolith", *sizes)
    ran = torchrun(2, "tests.nccl_rules", "step6_schedules", "--schedule", "1f1b", *sizes)
    assert ran.status == plain.status == 0, ran.text
    assert hash_in(ran.stdout) == hash_in(plain.stdout)


@pytest.mark.slow
def test_a_deadlocked_program_names_the_circle_under_the_rules():
    ran = torchrun(2, "tests.nccl_rules", "step6_schedules.break_it", "--schedule", "1f1b", "--timeout", 5)
    assert ran.status == 1
    assert "deadlock: rank 0 waits in send_forward to rank 1" in ran.stderr
    assert "rank 1 waits in send_backward to rank 0" in ran.stderr


def hash_in(text):
    return re.search(r"[0-9a-f]{64}", text).group()
