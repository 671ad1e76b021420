"""Ranks in a line that exchange messages, until rank 2 fails in the way that the command line says."""

import os
import signal
import sys
import time
from collections.abc import Callable

from step0_monolith.options import run_program
from step2_comms.__main__ import ACTIVATION, GRADIENT, first_input, open_line
from step2_comms.device import WorldOptions
from step2_comms.launch import read_launch
from step2_comms.world import World, open_world

FAILING_RANK = 2
ITERATIONS = 1000


def raise_() -> None:
    raise ValueError("planted")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit0() -> None:
    sys.exit(0)


def exit0_at_once() -> None:
    os._exit(0)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


WAYS = {"raise": raise_, "kill": kill, "exit0": exit0, "os_exit0": exit0_at_once, "stop": stop, "sleep": sleep(600)}


def exchange(world: World, fail: Callable[[], None] | None, ranks_that_fail: tuple[int, ...] = (FAILING_RANK,)) -> None:
    """Activations ahead and gradients back, again and again; the ranks that fail do so in the third iteration."""
    messages = open_line(world)
    first, last = world.rank == 0, world.rank == world.size - 1
    x = (first_input(),)
    for iteration in range(ITERATIONS):
        if not first:
            messages.recv_forward(ACTIVATION)
        world.watch.busy(f"iteration {iteration}")
        if iteration == 3 and world.rank in ranks_that_fail and fail is not None:
            fail()
        if not last:
            messages.send_forward(ACTIVATION, x)
            messages.recv_backward(GRADIENT)
        if not first:
            messages.send_backward(GRADIENT, x)
        if fail is None and first:
            print(f"iteration {iteration}", flush=True)
            time.sleep(0.1)


def main() -> None:
    way, timeout = sys.argv[1:]
    with open_world(read_launch("tests.programs.failing"), WorldOptions(device="cpu", timeout=timeout)) as world:
        exchange(world, None if way == "none" else WAYS[way])


if __name__ == "__main__":
    run_program(main)
