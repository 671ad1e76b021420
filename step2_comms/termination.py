"""SIGTERM with a moment to explain: torchrun sends it to all ranks as soon as one has died."""

import os
import select
import signal
import threading
import time

GRACE_SECONDS = 1.0
EXPLAIN_SECONDS = 4.0


class Termination:
    """Lets this process live on for a moment after SIGTERM, and for some seconds more while it explains a failure.

    The main thread may stand inside a message and not see a signal. The bytes that Python writes for each signal reach
    the thread that calls `wait` all the same, and that thread ends the process when its time is up.
    """

    def __init__(self) -> None:
        """Takes over SIGTERM where it can, which is in the main thread."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._asked: float | None = None
        self._is_explaining = False
        self._before: tuple | None = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
            self._before = (handler, signal.set_wakeup_fd(self._write, warn_on_full_buffer=False))

    def explain(self) -> None:
        """From here on this rank explains a failure, and then ends by itself."""
        self._is_explaining = True

    def wait(self, seconds: float) -> None:
        """Sleeps for so long, or until a signal or `wake`; ends the process with status 143 when it is time."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        if ready and signal.SIGTERM in os.read(self._read, 64) and self._asked is None:
            self._asked = time.monotonic()
        allowed = EXPLAIN_SECONDS if self._is_explaining else GRACE_SECONDS
        if self._asked is not None and time.monotonic() > self._asked + allowed:
            os._exit(128 + signal.SIGTERM)

    def wake(self) -> None:
        """Ends a `wait` in another thread."""
        os.write(self._write, b"\0")

    def restore(self) -> None:
        """Gives SIGTERM its earlier meaning back."""
        if self._before is not None:
            handler, wakeup = self._before
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, handler)
            self._before = None
            os.close(self._write)
            os.close(self._read)
