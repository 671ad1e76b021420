"""The messages of the last iterations, with their times: what a trace shows beside the actions."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from step2_comms.channel import Handle
from step5_orchestrator.actions import Value


class Transfer(NamedTuple):
    """One end of a message, in seconds of this rank's clock.

    A send is the call that hands the value over, which does not wait for its arrival. A receive is the time in which
    the action that needs the value waits for it: none where it was there already.
    """

    value: Value
    peer: int
    is_send: bool
    start: float
    end: float


class Recording:
    """Records the messages of a row. `kept` has the last iterations, as the executor has its events."""

    def __init__(self, iterations: int) -> None:
        self.current: list[Transfer] = []
        self.kept: deque[list[Transfer]] = deque(maxlen=iterations)

    def begin(self) -> None:
        """A new iteration starts."""
        self.current = []

    def finish(self) -> None:
        """The iteration is over."""
        self.kept.append(self.current)

    def send(self, value: Value, peer: int, call: Callable[[], None]) -> None:
        """Makes the call that sends `value`, and notes when."""
        start = time.perf_counter()
        call()
        self.current.append(Transfer(value, peer, True, start, time.perf_counter()))

    def take(self, value: Value, peer: int, values: dict, act: Callable[[], None]) -> None:
        """Waits for a value that the action needs, notes when, and then runs the action."""
        taken = values[value]
        start = time.perf_counter()
        if isinstance(taken, Handle):
            values[value] = taken.wait()
        self.current.append(Transfer(value, peer, False, start, time.perf_counter()))
        act()
