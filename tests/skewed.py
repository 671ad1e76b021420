"""A rank whose clock is wrong on purpose."""

import contextlib
import time
from collections.abc import Iterator


@contextlib.contextmanager
def skewed(seconds: float, rate: float = 1.0) -> Iterator[None]:
    """Inside, `time.perf_counter` of this process is `seconds` ahead and runs `rate` times as fast."""
    real, begun = time.perf_counter, time.perf_counter()
    time.perf_counter = lambda: begun + seconds + (real() - begun) * rate
    try:
        yield
    finally:
        time.perf_counter = real
