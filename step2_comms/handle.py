"""A message under way, waited for exactly once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from step0_monolith.model import Tensors
from step0_monolith.options import RunError
from step2_comms.contract import Spec

if TYPE_CHECKING:
    from step2_comms.channel import Channel


class Handle:
    """A message under way. `wait()` returns its tensors, () for a send; later calls return them again."""

    __slots__ = ("_buffers", "_call", "_channel", "_error", "_specs", "_tensors", "_works")

    def __init__(
        self, channel: "Channel", call: str, works: list, buffers: Sequence[Tensor], specs: Sequence[Spec]
    ) -> None:
        self._channel, self._call, self._works = channel, call, works
        # The buffers are held until the wait: gloo reads and writes them until then.
        self._buffers, self._specs = buffers, specs
        self._tensors: Tensors | None = None
        self._error: Exception | None = None

    def wait(self) -> Tensors:
        """Waits until the message has been handed over (send) or is here (receive).

        Raises RunError that names the root when the peer is lost or the timeout passes; later calls raise it again.
        """
        if self._tensors is None:
            self._finish()
        return self._tensors

    def _finish(self) -> None:
        if self._error is not None:
            raise self._error
        channel, works = self._channel, self._works
        watch = channel.watch
        # Each work only once: a second wait on the same one can hang.
        self._works = []
        before = watch.waits(self._call, channel.peer)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._error = watch.explained(error)
            raise self._error from (None if self._error is error else error)
        watch.goes_on(before)
        self._tensors = channel.finished(self, self._buffers, self._specs)
        self._buffers = ()

    def give_up(self) -> None:
        """Lets go of the message; a later `wait` raises RunError."""
        self._error = RunError(f"{self._call} was given up: the channel is closed")
        self._works, self._buffers = [], ()
