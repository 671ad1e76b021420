"""A progress bar where a person watches, and a few plain lines everywhere."""

import sys

from tqdm import tqdm


class Progress:
    """Shows the loss of some ten iterations as lines, and a bar on a terminal; nothing when `show` is false."""

    def __init__(self, num_iterations: int, show: bool, done: int = 0) -> None:
        """done: iterations that an earlier run has done already."""
        self._num_iterations = num_iterations
        self._show = show
        self._every = max(1, num_iterations // 10)
        self._done = done
        self._bar = None

    def __enter__(self) -> "Progress":
        if self._show:
            self._bar = tqdm(
                total=self._num_iterations,
                initial=self._done,
                unit="it",
                leave=False,
                disable=sys.stderr is None or not sys.stderr.isatty(),
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, loss: float) -> None:
        """Counts one more iteration, whose loss was `loss`."""
        self._done += 1
        if self._bar is None:
            return
        self._bar.update()
        if self._done in (1, self._num_iterations) or self._done % self._every == 0:
            tqdm.write(f"iteration {self._done:5d}  loss {loss:.4f}")
