"""One piece of work at a time beside the main thread; what goes wrong there comes to light here."""

import threading
from collections.abc import Callable

GIVE_UP_SECONDS = 5.0


class Background:
    """Runs work in a thread that does not keep the process alive."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._given_up = threading.Event()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants the work any more: work that waits for others should end."""
        return self._given_up.is_set()

    def start(self, work: Callable[[], None]) -> None:
        """Starts `work` once the work before it has ended. Raises what that has raised."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raises what the work has raised, if it has; does not wait."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Waits for the work's end. Raises what it has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def give_up(self) -> None:
        """Asks the work to end, and waits for its end some seconds; raises nothing.

        A thread that is inside a call of torch while Python ends takes the process down with SIGABRT.
        """
        self._given_up.set()
        if self._thread is not None:
            self._thread.join(GIVE_UP_SECONDS)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # nobody else would see it
            self._error = error
