"""Step 2: when a rank fails, every rank ends in time and says which one it was."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from step0_monolith.options import RunError
from step2_comms.contract import Message, specs_of
from step2_comms.notes import Note
from step2_comms.p2p import Messages, edges_of_a_line
from step2_comms.watch import Watch
from tests.programs import failing
from tests.ranks import ROOT, end_job, job_environment, processes_of, torchrun

# In the pool: four ranks that stay alive, so that nobody but the ranks themselves ends a wait.

NEIGHBOURS = {
    1: "rank 1 waits in recv_backward from rank 2 (gradient of microbatch 0)",
    3: "rank 3 waits in recv_forward from rank 2 (activation of microbatch 0)",
}


def survivors_name_rank_2(outcomes, what):
    for rank in (0, 1, 3):
        error = outcomes[rank].error
        assert error.startswith(f"RunError: rank {rank} "), error
        assert what in error
    for rank, waits in NEIGHBOURS.items():
        assert waits in outcomes[rank].error
    # Rank 0 learns of it through rank 1.
    assert "rank 0 waits in recv_backward from rank 1" in outcomes[0].error
    assert NEIGHBOURS[1] in outcomes[0].error


def test_a_rank_that_raises(pool):
    outcomes = pool.outcomes(4, failing.exchange, failing.raise_)
    assert outcomes[2].error == "ValueError: planted"
    survivors_name_rank_2(outcomes, "lost its peer: rank 2 failed: ValueError: planted")


def killed_while_the_launcher_ends_the_others(world):
    """torchrun ends all ranks when it sees a dead one, here 1 s later: in the middle of the neighbours' explanation."""
    if world.rank in NEIGHBOURS:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    failing.exchange(world, failing.kill)


def test_a_rank_that_is_killed(pool):
    outcomes = pool.outcomes(4, killed_while_the_launcher_ends_the_others)
    assert outcomes[2].error == "died with exit code -9"
    survivors_name_rank_2(outcomes, "lost its peer: rank 2 does not answer: killed, stopped or gone")


def test_a_rank_that_calls_exit_0(pool):
    outcomes = pool.outcomes(4, failing.exchange, failing.exit0)
    assert outcomes[2].error == "SystemExit: 0"
    survivors_name_rank_2(outcomes, "lost its peer: rank 2 left before its work was done while in iteration 3")


@pytest.mark.slow
def test_a_rank_that_exits_without_a_word(pool):
    outcomes = pool.outcomes(4, failing.exchange, failing.exit0_at_once)
    assert outcomes[2].error == "died with exit code 0"
    survivors_name_rank_2(outcomes, "lost its peer: rank 2 does not answer: killed, stopped or gone")


def sleep_too_long():
    time.sleep(3)


def test_a_rank_that_sleeps_past_the_timeout(pool):
    outcomes = pool.outcomes(4, failing.exchange, sleep_too_long, timeout=2, limit=2 + 10)
    survivors_name_rank_2(outcomes, "rank 2 is alive but has been busy for")
    assert "timed out" in outcomes[1].error or "timed out" in outcomes[3].error
    assert "while in iteration 3 at test_step2_failures.py:" in outcomes[3].error
    # When it wakes up nobody waits for it any more: that is no deadlock.
    late = outcomes[2].error
    assert late.startswith("RunError: rank 2 came too late, it was busy for 2 s while in iteration 3 at ")
    assert "; rank 3 waits in recv_forward from rank 2" in late


def stop_for_a_while():
    """Stopped, and killed later, by a process that outlives nobody."""
    subprocess.Popen(["sh", "-c", f"sleep 9; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_a_rank_that_is_stopped(pool):
    outcomes = pool.outcomes(4, failing.exchange, stop_for_a_while, timeout=3)
    assert outcomes[2].error == "died with exit code -9"
    survivors_name_rank_2(outcomes, "rank 2 does not answer: killed, stopped or gone")
    assert "timed out" in outcomes[1].error


def test_two_ranks_that_fail_at_once(pool):
    outcomes = pool.outcomes(4, failing.exchange, failing.raise_, (1, 2))
    errors = [outcome.error for outcome in outcomes]
    assert "rank 0 lost its peer: rank 1 failed: ValueError: planted; rank 0 waits in" in errors[0]
    assert "rank 2 failed: ValueError: planted; rank 3 waits in" in errors[3] or "rank 1 failed" in errors[3]
    assert "ValueError: planted" in errors[1]


def leave_early(world):
    """Rank 0 believes that it is done; ranks 1 and 2 wait for it, one directly."""
    messages = Messages(world, edges_of_a_line(world.size))
    for rank in (1, 2):
        if world.rank in (rank, rank - 1):
            x = [Message("x", specs_of([torch.ones(2)]))]
            messages.channel("forward", rank - 1, rank).agree(x)
    if world.rank == 0:
        return "done"
    messages.recv_forward("x")
    return None


def test_ranks_that_finish_while_others_wait_for_them(pool):
    outcomes = pool.outcomes(3, leave_early)
    assert (outcomes[0].value, outcomes[0].error) == ("done", "")
    for rank in (1, 2):
        assert f"rank {rank} lost its peer: rank 0 has finished; " in outcomes[rank].error
    assert "rank 2 waits in recv_forward from rank 1 (x)" in outcomes[2].error


def fail_before_the_contract(world):
    """Rank 0 fails before it has said what it will send; rank 2 waits for it by way of rank 1."""
    messages = Messages(world, edges_of_a_line(world.size))
    if world.rank == 0:
        raise ValueError("planted")
    channel = messages.channel("forward", world.rank - 1, world.rank)
    script = channel.agree()
    if world.rank == 1:
        messages.channel("forward", 1, 2).agree(script)


def test_a_contract_that_never_comes(pool):
    _, one, two = pool.outcomes(3, fail_before_the_contract)
    assert "rank 1 lost its peer: rank 0 failed: ValueError: planted; rank 1 waits in the contract of" in one.error
    assert "rank 2 lost its peer: rank 0 failed: ValueError: planted; " in two.error
    assert "rank 2 waits in the contract of forward 1 to 2" in two.error


def never_agrees(world):
    messages = Messages(world, edges_of_a_line(2))
    if world.rank == 1:
        messages.channel("forward", 0, 1).agree()
    world.watch.busy("thinking")
    time.sleep(1.8)


def test_a_contract_that_comes_too_late(pool):
    error = pool.outcomes(2, never_agrees, timeout=1)[1].error
    assert "rank 1 timed out: rank 0 is alive but has been busy for 1 s while in thinking at " in error


def finish_before_the_failure(world):
    """Ranks 0 and 1 are done and gone when rank 2 fails, for which rank 3 waits."""
    if world.rank < 2:
        return "done"
    for rank in (0, 1):
        world.store.wait([f"note/{rank}"])
    if world.rank == 2:
        raise ValueError("planted")
    return world.gather("x")


def test_ranks_that_finished_are_not_blamed(pool):
    outcomes = pool.outcomes(4, finish_before_the_failure)
    assert [outcome.value for outcome in outcomes[:2]] == ["done"] * 2
    assert outcomes[3].error.startswith("RunError: rank 3 lost its peer: rank 2 failed: ValueError: planted; ")


def both_receive_first(world):
    messages = failing.open_line(world)
    if world.rank == 0:
        messages.recv_backward(failing.GRADIENT)
    else:
        messages.recv_forward(failing.ACTIVATION)


def both_send_first(world, num_floats):
    messages = Messages(world, edges_of_a_line(2))
    x = torch.zeros(num_floats)
    messages.channel("forward", 0, 1).agree([Message("x", specs_of([x]))])
    messages.channel("backward", 1, 0).agree([Message("g", specs_of([x]))])
    if world.rank == 0:
        messages.send_forward("x", [x])
    else:
        messages.send_backward("g", [x])


DEADLOCKS = [
    pytest.param(
        both_receive_first,
        (),
        "deadlock: rank 0 waits in recv_backward from rank 1 (gradient of microbatch 0), "
        "rank 1 waits in recv_forward from rank 0 (activation of microbatch 0)",
        id="both receive first",
    ),
    pytest.param(
        both_send_first,
        (10,),
        "deadlock: rank 0 waits in send_forward to rank 1 (x), rank 1 waits in send_backward to rank 0 (g)",
        id="both send 10 floats first",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        both_send_first,
        (20_000_000,),
        "deadlock: rank 0 waits in send_forward to rank 1 (x), rank 1 waits in send_backward to rank 0 (g)",
        id="both send 20 million floats first",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("function", "arguments", "circle"), DEADLOCKS)
def test_a_deadlock_is_called_one(pool, function, arguments, circle):
    for outcome in pool.outcomes(2, function, *arguments, timeout=2, limit=2 + 10):
        assert circle in outcome.error


# The watch alone, in this process.


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


LOST = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")


@pytest.fixture
def watch(store):
    watch = Watch(store, 0, 3)
    yield watch
    watch.stop()


def test_sigterm_gets_its_meaning_back(store, watch):
    before = signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) != before
    store.set("note/1", Note(1, "failed", error="E: x").to_json())
    with pytest.raises(RunError, match="rank 0 lost its peer: rank 1 failed: E: x; rank 0 waits in recv from 1"):
        with watch.waiting("recv from 1", 1):
            raise LOST
    watch.stop()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_first_explanation_stays(store, watch):
    store.set("note/1", Note(1, "failed", error="E: x").to_json())
    watch.doing = ("waits", "recv from 1", 1, time.monotonic())
    first = str(watch.explained(LOST))
    watch.doing = ("waits", "recv from 2", 2, time.monotonic())
    assert str(watch.explained(RuntimeError("Timed out"))) == first
    watch.failed(ZeroDivisionError("later"))
    note = Note.from_json(store.get("note/0"))
    assert (note.state, note.call, note.peer) == ("waits", "recv from 1", 1)


def test_an_answer_does_not_replace_the_last_words(store, watch):
    watch.failed(ValueError("x"))
    store.set("alarm", "1")
    store.get("alarm")  # `set` alone returns before the store has the value
    assert watch._answer()
    assert Note.from_json(store.get("note/0")).state == "failed"


def test_an_error_that_is_no_lost_peer_keeps_its_text(store, watch):
    watch.doing = ("waits", "recv from 1", 1, time.monotonic())
    error = watch.explained(RuntimeError("invalid tensor size\nmore"))
    assert str(error) == "rank 0 failed in recv from 1: RuntimeError: invalid tensor size"
    assert Note.from_json(store.get("note/0")).error == "RuntimeError: invalid tensor size"


def test_a_failure_that_was_caught_stays_the_root(store, watch):
    watch.failed(ValueError("x"))
    watch.doing = ("waits", "recv from 1", 1, time.monotonic())
    assert str(watch.explained(LOST)) == "rank 0 cannot go on: rank 0 failed: ValueError: x"
    assert Note.from_json(store.get("note/0")).error == "ValueError: x"


def test_a_silent_rank_is_waited_for_once(store, watch, monkeypatch):
    monkeypatch.setattr("step2_comms.watch.ANSWER_SECONDS", 0.1)
    watch.doing = ("waits", "recv from 1", 1, time.monotonic())
    watch.explained(LOST)
    assert store.check(["note/1"])
    assert Note.from_json(store.get("note/1")).state == "silent"


STORE_OF_ITS_OWN = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_the_store_is_gone():
    with subprocess.Popen([sys.executable, "-c", STORE_OF_ITS_OWN], stdin=-1, stdout=-1, text=True) as process:
        watch = Watch(dist.TCPStore("127.0.0.1", int(process.stdout.readline()), is_master=False), 0, 2)
        process.kill()
        process.wait()
        watch.doing = ("waits", "recv from 1", 1, time.monotonic())
        text = "rank 0 lost its peer: rank 0 waits in recv from 1, and the launcher's store is gone too"
        assert str(watch.explained(LOST)) == text
        watch.failed(ValueError("x"))
        watch.finish()


# Under torchrun

FAILING = "tests.programs.failing"
ENDINGS = {
    "raise": "rank 2 failed: ValueError: planted",
    "kill": "rank 2 does not answer: killed, stopped or gone",
    "exit0": "rank 2 left before its work was done while in iteration 3",
    "os_exit0": "rank 2 does not answer: killed, stopped or gone",
    "sleep": "rank 2 is alive but has been busy for",
    "stop": "rank 2 does not answer: killed, stopped or gone",
}
START = 30  # seconds that torchrun and the imports may take on a busy machine
TIMEOUT = 5


def failing_under_torchrun(way):
    limit = START + TIMEOUT + 10 + (40 if way == "stop" else 0)
    ran = torchrun(4, FAILING, way, str(TIMEOUT), limit=limit)
    assert ran.status != 0
    lines = [line for line in ran.stderr.splitlines() if line.startswith("error: rank ")]
    assert any(ENDINGS[way] in line for line in lines), ran.stderr
    for line in lines:
        assert "rank 2" in line
    # torchrun has a traceback of its own; only a rank that raises has one of ours.
    assert ("failing.py" in ran.stderr.replace("FAILED", "")) == (way in ("raise", "sleep")), ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["raise", "kill", "os_exit0", "sleep", "stop"])
def test_a_failing_rank_under_torchrun(way):
    failing_under_torchrun(way)


def good_under_torchrun(_):
    ran = torchrun(2, "step2_comms", limit=START + 60)
    assert ran.status == 0, ran.stderr
    assert "verified on 2 ranks" in ran.stdout


@pytest.mark.slow
def test_two_jobs_at_once_one_of_which_fails():
    with ThreadPoolExecutor(2) as both:
        jobs = [both.submit(failing_under_torchrun, "exit0"), both.submit(good_under_torchrun, None)]
    for job in jobs:
        job.result()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_jobs_at_once_three_times():
    with ThreadPoolExecutor(8) as all_jobs:
        for _ in range(3):
            list(all_jobs.map(lambda _: torchrun(2, "step2_comms", limit=170).stdout.index("verified"), range(8)))


def test_ranks_end_with_their_launcher():
    job, environment = job_environment()
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", FAILING, "none", "60"]
    launcher = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert launcher.stdout.readline() == "iteration 0\n"
        assert len(processes_of(job)) >= 3
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 10
        while processes_of(job) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(job) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            launcher.kill()
        end_job(job)
        launcher.stdout.close()
