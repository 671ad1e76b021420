"""Emulated devices: an action takes at least a given time, so that P processes on two cores behave as P devices."""

import time
from dataclasses import dataclass

from step0_monolith.options import Options, option, optional
from step5_orchestrator.costs import Cost, read_costs


def _milliseconds(flag: str, value: str | Cost) -> Cost:
    return read_costs(flag, value, "F=5,B=10")


SLEEPS_LATE = 0.0002  # seconds


@dataclass(frozen=True)
class EmulateOptions(Options):
    """Whether actions and messages are stretched."""

    emulate: Cost | None = option(
        None,
        optional(_milliseconds),
        "milliseconds that an action takes at least, and (comm) a message travels at least, such as F=5,B=10,comm=1; "
        "I and W not named take B/2 each (default: no stretching)",
    )


def sleep_out(started: float, milliseconds: float) -> None:
    """Waits until `milliseconds` have passed since `started` (a reading of perf_counter)."""
    end = started + milliseconds / 1e3
    # A sleep ends about a tenth of a millisecond late, and on the longest path such delays would add up.
    if (left := end - time.perf_counter() - SLEEPS_LATE) > 0:
        time.sleep(left)
    while time.perf_counter() < end:
        pass
