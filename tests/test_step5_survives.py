"""Step 5: training under torchrun goes on after kills, and its final bits are those of a run that nobody disturbed."""

import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from step0_monolith.checkpoints import CheckpointOptions
from step0_monolith.result import weights_sha256
from step0_monolith.train import train
from step2_comms import meet
from tests.chaos import Kill, TrainingJob, drawn, newest
from tests.monolith import monolith, small

SLOW_DISK = "tests.programs.slow_disk"
OURS = re.compile(r'File ".*[/\\](step\d_\w+|tests)[/\\]')  # in a traceback


def assert_undisturbed(job, config):
    """Losses of all iterations and the final weights, of an interrupted run, against the monolith's."""
    found, expected = job.result(), monolith(config)
    assert found.losses == expected.losses, job.log
    assert found.weights_sha256 == expected.weights_sha256, job.log
    assert newest(job.checkpoints).iteration == config.num_iterations
    # Two stay, and nothing of what was interrupted.
    names = sorted(path.name for path in job.checkpoints.iterdir())
    assert [name.split("-")[0] for name in names] == ["iteration", "iteration", "latest", "lock"], names


def assert_monolith_goes_on(job, config):
    """The last whole checkpoint of a run that was ended, taken to the end in one process."""
    assert newest(job.checkpoints).iteration < config.num_iterations
    finished = train(config, checkpoints=CheckpointOptions(checkpoint_dir=job.checkpoints, resume=True))
    assert finished.losses == monolith(config).losses
    assert weights_sha256(finished.parameters) == monolith(config).weights_sha256


@pytest.mark.slow
def test_a_rank_killed_at_iteration_7_and_one_while_saving(tmp_path):
    config = small(num_iterations=19, optimizer="adam")  # 19: each iteration has its line
    with TrainingJob(tmp_path, config, 2, "--emulate", "F=10,B=20", module=SLOW_DISK, restarts=2) as job:
        job.next_attempt()
        job.await_line("iteration     7 ")
        job.wait_until((job.checkpoints / "iteration-00000005").exists, "checkpoint 5")
        job.kill(1)
        job.next_attempt()
        job.await_line("resuming after iteration 5 from")
        job.await_moment("saving")
        job.kill(0)
        assert newest(job.checkpoints).iteration in (5, 10)
        assert job.end() == 0, job.log
    assert len(re.findall("resuming after iteration (5|10) ", job.log)) == 2
    assert job.killed == 2
    assert_undisturbed(job, config)


CHAOS = [
    pytest.param(2, "1f1b", {"optimizer": "adam"}, id="2 ranks"),
    pytest.param(3, "zb-h1", {"optimizer": "adam", "dtype": "bfloat16"}, id="3 ranks"),
    pytest.param(4, "interleaved", {"max_grad_norm": 1.0, "accumulate": 7}, id="4 ranks"),
]
# In each run: how many ranks each kill hits, 8 in all; and where the launcher (0) is killed too, once more than here.
RANKS_HIT = (1, 1, 2, 2, 2)
LAUNCHER_HIT = (0, 0, 0, 1, 1, 2)


def survive(folder, config, num_ranks, schedule, kills):
    arguments = ("--schedule", schedule, "--emulate", "F=2,B=4", "--timeout", 20)
    with TrainingJob(folder, config, num_ranks, *arguments, module=SLOW_DISK, restarts=len(kills), every=7) as job:
        for kill in kills:
            job.carry_out(kill)
        assert job.end(90) == 0, job.log
    assert not OURS.search(job.log), job.log
    assert "terminate called" not in job.log
    assert job.killed == 8
    assert_undisturbed(job, config)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_ranks", "schedule", "changes"), CHAOS)
def test_kills_drawn_from_a_seed(tmp_path, num_ranks, schedule, changes):
    config = small(**{"num_iterations": 98, "num_layers": 9, **changes})
    survive(tmp_path, config, num_ranks, schedule, drawn(1, num_ranks, RANKS_HIT))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_launcher_killed_and_started_again_by_hand(tmp_path):
    config = small(num_iterations=98, optimizer="adam")
    # First while the ranks still import torch, when nobody can tell them.
    survive(tmp_path, config, 2, "1f1b", [Kill((), "starting", 0.2), *drawn(2, 2, LAUNCHER_HIT)])


def test_ranks_whose_launcher_died_before_they_looked(monkeypatch):
    """Its store is there before its ranks are, so that one who finds nobody there need not wait for the timeout."""
    monkeypatch.setattr(meet, "LAUNCHER_IS_GONE_SECONDS", 0.2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    with pytest.raises(RuntimeError, match="the launcher died"):
        meet._await_store(30)


TIMEOUT = 5


def stop_a_rank(folder):
    """SIGSTOP: noticed within the timeout, named, and all gone in the time of DESIGN 4.5."""
    config = small(num_iterations=300)
    arguments = ("--emulate", "F=5,B=10", "--timeout", TIMEOUT)
    with TrainingJob(folder, config, 3, *arguments, module="step5_orchestrator") as job:
        job.next_attempt()
        job.wait_until(lambda: newest(job.checkpoints), "a checkpoint")
        job.signal(signal.SIGSTOP, rank=1)
        assert job.end(TIMEOUT + 10 + 40) == 1
    lines = [line for line in job.log.splitlines() if line.startswith("error: rank ")]
    assert any(re.match("error: rank [02] timed out: rank 1 does not answer: killed, stopped or gone", line)
               for line in lines), job.log  # fmt: skip
    assert not OURS.search(job.log), job.log
    assert_monolith_goes_on(job, config)


def interrupt(folder):
    """Ctrl-C, which a terminal sends to torchrun alone, since each rank has a session of its own."""
    config = small(num_iterations=400, optimizer="adam")
    with TrainingJob(folder, config, 2, "--emulate", "F=5,B=10", "--schedule", "gpipe", module=SLOW_DISK) as job:
        job.next_attempt()
        job.wait_until(lambda: newest(job.checkpoints), "a checkpoint")
        job.await_moment("saving")
        start = time.monotonic()
        job.signal(signal.SIGINT)
        assert job.end() == 1
        assert time.monotonic() < start + 10
    assert_monolith_goes_on(job, config)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_rank_in_one_job_and_ctrl_c_in_another(tmp_path):
    with ThreadPoolExecutor(2) as both:
        jobs = []
        for function in (stop_a_rank, interrupt):
            (tmp_path / function.__name__).mkdir()
            jobs.append(both.submit(function, tmp_path / function.__name__))
    for job in jobs:
        job.result()
