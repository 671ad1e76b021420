"""A rank whose clock is wrong on purpose."""

import contextlib
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def skewed(seconds: float, rate: float = 1.0) -> Iterator[Callable[[], float]]:
    """Inside, `time.perf_counter` is `seconds` ahead and runs `rate` times as fast. Gives the real one."""
    real, begun = time.perf_counter, time.perf_counter()
    time.perf_counter = lambda: begun + seconds + (real() - begun) * rate
    try:
        yield real
    finally:
        time.perf_counter = real
