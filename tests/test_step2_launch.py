"""Step 2: what the launcher says, which device is chosen, and how a world opens and closes."""

import os
import socket
import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.distributed as dist

from step0_monolith.options import UsageError
from step2_comms.device import WorldOptions, choose
from step2_comms.launch import Launch, read_launch
from step2_comms.meet import check_master
from tests.ranks import ROOT, job_environment, python

GOOD = {
    "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}  # fmt: skip
COMMAND = "torchrun --standalone --nproc-per-node 4 -m step9"


def without(*names, **changed):
    return {name: value for name, value in {**GOOD, **changed}.items() if name not in names}


def test_a_good_environment():
    assert read_launch("step9", environment=GOOD) == Launch(2, 4, 0, 2)
    by_hand = without("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert read_launch("step9", environment=by_hand) == Launch(2, 4, 2, 4)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "step9 runs on several ranks and was not started by torchrun"),
        ({"MASTER_PORT": "29500", "MASTER_ADDR": "a"}, "step9 runs on several ranks and was not started by torchrun"),
        ({"RANK": "0"}, "RANK set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE set but RANK, MASTER_ADDR, MASTER_PORT missing"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK set but RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
        (without("MASTER_PORT"), "but MASTER_PORT missing"),
        (without("MASTER_ADDR"), "but MASTER_ADDR missing"),
        (without(MASTER_ADDR=" "), "MASTER_ADDR=' ' is not the name of a host"),
        (without(RANK="x"), "RANK='x' is not a whole number"),
        (without(RANK=""), "RANK='' is not a whole number"),
        (without(RANK="-1"), "RANK='-1' is not a whole number"),
        (without(RANK="²"), "RANK='²' is not a whole number"),
        (without(WORLD_SIZE="2.5"), "WORLD_SIZE='2.5' is not a whole number"),
        (without(LOCAL_RANK="9" * 5000), "is not a whole number"),
        (without(RANK="4"), "RANK=4 WORLD_SIZE=4"),
        (without(WORLD_SIZE="0"), "a rank is below the number of ranks"),
        (without(LOCAL_RANK="2"), "LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 do not fit together"),
        (without(LOCAL_WORLD_SIZE="5"), "LOCAL_WORLD_SIZE=5 do not fit together"),
        (without(MASTER_PORT="0"), "MASTER_PORT=0 is not a port (1..65535)"),
        (without(MASTER_PORT="99999"), "MASTER_PORT=99999 is not a port (1..65535)"),
        (without(MASTER_PORT="http"), "MASTER_PORT='http' is not a whole number"),
    ],
)
def test_a_bad_environment_is_refused_with_the_command(environment, words):
    with pytest.raises(UsageError) as refused:
        read_launch("step9", environment=environment)
    text = str(refused.value)
    assert words in text
    assert text.endswith(f"; run: {COMMAND}")
    assert "\n" not in text


def test_the_number_of_ranks_must_fit():
    one = without(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    assert read_launch("step9", environment=one).size == 1
    with pytest.raises(UsageError, match=f"needs at least 2 ranks, not 1; run: {COMMAND}"):
        read_launch("step9", at_least=2, environment=one)
    with pytest.raises(
        UsageError, match="takes at most 2 ranks, not 4; run: torchrun --standalone --nproc-per-node 2 -m step9"
    ):
        read_launch("step9", at_least=2, at_most=2, environment=GOOD)


@pytest.mark.parametrize(
    "environment", [{}, pytest.param({"RANK": "0"}, marks=pytest.mark.slow)], ids=["none", "RANK alone"]
)
def test_without_torchrun_one_line_and_status_2(environment):
    ran = python("step2_comms", environment=environment)
    assert ran.status == 2
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("run: torchrun --standalone --nproc-per-node 4 -m step2_comms")


# Devices: four ranks on this host, seen from local rank 1.

CPU = ("cpu", "gloo", None)
NCCL = ("cuda:1", "nccl", None)
MPS = ("cpu", "gloo", "torch.distributed does not run on MPS: using the CPU with gloo")
FEW = "NCCL needs a GPU for each of the 4 ranks on this host, which has"
NO_GPU = "--device cuda: torch finds no CUDA GPU here"
CPU_NCCL = "--backend nccl needs --device cuda"


def shares(gpus):
    return ("cpu", "gloo", f"{gpus} for 4 ranks: using the CPU with gloo; to share a GPU: --device cuda --backend gloo")


EXPECTED = {
    # device, backend: without a GPU, with 1, 3, 4 and 8 (a text alone: refused)
    ("auto", "auto"): (CPU, shares("1 GPU"), shares("3 GPUs"), NCCL, NCCL),
    ("auto", "gloo"): (CPU, CPU, CPU, CPU, CPU),
    ("auto", "nccl"): (f"{FEW} 0 GPUs", f"{FEW} 1 GPU;", f"{FEW} 3 GPUs", NCCL, NCCL),
    ("cpu", "auto"): (CPU, CPU, CPU, CPU, CPU),
    ("cpu", "gloo"): (CPU, CPU, CPU, CPU, CPU),
    ("cpu", "nccl"): (CPU_NCCL, CPU_NCCL, CPU_NCCL, CPU_NCCL, CPU_NCCL),
    ("cuda", "auto"): (NO_GPU, f"{FEW} 1 GPU;", f"{FEW} 3 GPUs", NCCL, NCCL),
    ("cuda", "gloo"): (NO_GPU, ("cuda:0", "gloo", None), ("cuda:1", "gloo", None), ("cuda:1", "gloo", None),
                       ("cuda:1", "gloo", None)),
    ("cuda", "nccl"): (NO_GPU, f"{FEW} 1 GPU;", f"{FEW} 3 GPUs", NCCL, NCCL),
}  # fmt: skip


@pytest.mark.parametrize(("device", "backend"), list(product(("auto", "cpu", "cuda"), ("auto", "gloo", "nccl"))))
@pytest.mark.parametrize("has_mps", [False, True], ids=["", "mps"])
def test_device_and_backend(device, backend, has_mps):
    options = WorldOptions(device=device, backend=backend)
    for num_gpus, expected in zip((0, 1, 3, 4, 8), EXPECTED[device, backend], strict=True):
        if has_mps and num_gpus:
            continue  # no machine has both
        if has_mps and device == "auto" and expected == CPU:
            expected = MPS
        if isinstance(expected, str):
            with pytest.raises(UsageError) as refused:
                choose(options, 1, 4, num_gpus, has_mps)
            assert expected in str(refused.value)
            assert "use --" in str(refused.value) or "use fewer" in str(refused.value) or "needs --" in expected
        else:
            choice = choose(options, 1, 4, num_gpus, has_mps)
            assert (str(choice.device), choice.backend, choice.note) == expected


@pytest.mark.parametrize("timeout", ["0", "-1", "0.0001", "1e9", "nan", "inf", "soon"])
def test_timeouts_that_make_no_sense(timeout):
    with pytest.raises(UsageError, match="--timeout"):
        WorldOptions(timeout=timeout)


# Opening and closing


def threads(world):
    return torch.get_num_threads(), "OMP_NUM_THREADS" in os.environ


def test_one_thread_a_process(pool):
    assert pool.run(2, threads) == [(1, False)] * 2


def gathered(world):
    from_rank_1 = world.broadcast(torch.tensor([world.rank]), 1)
    return world.gather(world.rank * 10), from_rank_1.item()


def test_gather_and_broadcast(pool):
    assert pool.run(3, gathered) == [([0, 10, 20], 1), (None, 1), (None, 1)]


def closing_fails_too(world):
    close = dist.destroy_process_group

    def fails(group=None):
        dist.destroy_process_group = close
        raise RuntimeError("second error, in closing")

    dist.destroy_process_group = fails
    world.at_close.append(lambda: 1 / 0)
    raise ValueError("first error")


def test_an_error_in_closing_does_not_hide_the_first_one(pool):
    (outcome,) = pool.outcomes(1, closing_fails_too)
    assert outcome.error == "ValueError: first error"
    assert "second error" not in outcome.traceback


def closes_what_was_opened(world):
    world.at_close.append(lambda: world.store.set(f"closed {world.rank}", ""))


def test_what_is_open_is_closed_at_the_end(pool):
    """An error in closing is an error when there was none before."""
    assert pool.run(1, closes_what_was_opened) == [None]
    (outcome,) = pool.outcomes(1, fails_at_close)
    assert "ZeroDivisionError" in outcome.error


def fails_at_close(world):
    world.at_close.append(lambda: 1 / 0)


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_a_host_without_an_address(monkeypatch, error):
    def look_up(host, port):
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "far")
    with pytest.raises(UsageError, match="MASTER_ADDR='far' has no address"):
        check_master()


def test_an_address_is_good(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    check_master()


@pytest.mark.slow
def test_a_missing_rank_ends_the_start():
    """Rank 0 of 2, started by hand, alone."""
    _, environment = job_environment()
    port = str(_free_port())
    environment |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "step2_comms", "--timeout", "0.2"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=60)
    assert ran.returncode == 1
    assert "error: rank 0: not all of the 2 ranks came within 5.2 s" in ran.stderr
    assert "Traceback" not in ran.stderr


def _free_port():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
