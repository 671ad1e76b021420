"""Emulated devices: an action takes at least a given time, so that P processes on two cores behave as P devices."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from step0_monolith.options import Options, UsageError, number, option, optional
from step5_orchestrator.actions import OPS

Milliseconds = Mapping[str, float]


def _costs(flag: str, value: str | Milliseconds) -> dict[str, float]:
    if not isinstance(value, str):
        value = ",".join(f"{op}={cost}" for op, cost in value.items())
    costs = {}
    for part in value.split(","):
        op, sign, text = part.partition("=")
        if op not in OPS or not sign or op in costs:
            raise UsageError(f"{flag} {value!r}: {part!r} is not one of {', '.join(f'{o}=ms' for o in OPS)}, each once")
        costs[op] = number(above=0, at_most=86_400_000)(f"{flag} {op}", text)
    if set(costs) != set(OPS):
        raise UsageError(f"{flag} {value!r} must name {' and '.join(OPS)}, such as F=5,B=10")
    return costs


@dataclass(frozen=True)
class EmulateOptions(Options):
    """Whether actions are stretched."""

    emulate: Milliseconds | None = option(
        None, optional(_costs), "milliseconds that an action takes at least, such as F=5,B=10 (default: no stretching)"
    )


def sleep_out(started: float, milliseconds: float) -> None:
    """Sleeps until `milliseconds` have passed since `started` (a reading of perf_counter)."""
    left = started + milliseconds / 1e3 - time.perf_counter()
    if left > 0:
        time.sleep(left)
