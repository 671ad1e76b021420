"""Messages that travel slowly, for emulation: a send is posted a fixed time after it was asked for."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class LateWork:
    """A send that will be posted; `wait()` returns when it has been posted and handed over."""

    def __init__(self, posted: Future) -> None:
        self._posted = posted

    def wait(self) -> None:
        """Raises what posting or the message itself raised."""
        self._posted.result().wait()


class LateSends:
    """Posts the sends of one channel in their order, each `seconds` after it was asked for; the caller goes on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # A thread of its own: the rank computes meanwhile, as it would while a real message travels.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="late-sends")

    def post(self, operation: Callable, *arguments, **keywords) -> LateWork:
        """Asks for one send."""
        due = time.perf_counter() + self._seconds

        def later():
            time.sleep(max(0.0, due - time.perf_counter()))
            return operation(*arguments, **keywords)

        return LateWork(self._thread.submit(later))

    def close(self) -> None:
        """Gives up what was not posted yet."""
        self._thread.shutdown(wait=False, cancel_futures=True)
