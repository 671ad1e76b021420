"""Bytes of tensors, counted as long as they take memory."""

import weakref
from collections.abc import Iterable

from torch import Tensor


class Ledger:
    """Bytes of the tensors that were noted and still take memory, whoever holds them: held now, and at the most, peak.

    Storages are counted, each once, until they are given back; those of the tensors that were there before are not.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        self.held = self.peak = 0
        self._before = [tensor.untyped_storage() for tensor in before]  # held, so that no other gets the address
        self._known = {storage.data_ptr() for storage in self._before}

    def note(self, tensor: Tensor) -> None:
        """Counts a tensor, if it was not counted before."""
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.held += num_bytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._forget, address, num_bytes).atexit = False

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.held -= num_bytes
