"""Gradients that are still on the device because their copies to the host are in flight."""

from __future__ import annotations

import threading
from collections import Counter, deque

import torch

from partool_runtime.offload.lanes import Mark
from partool_runtime.torch_internals.tensors import storage_key

MOST = 2
"""Number of pieces of memory that may always be held: one piece each of the latest and the previous reduction."""


class Leaving:
    """Holds gradients until their copies are done, and blocks the host while gradients take too much device memory.

    The host queues work on a device far ahead of its execution, so gradients that wait for the link would accumulate,
    possibly all gradients of the model, although offload is meant to save their memory. Gradients that FSDP2 reduces
    in one operation are one piece of memory. Up to :data:`MOST` pieces may always be held, and more pieces only if all
    of them fit into ``most_bytes``. While the host waits for the copy of the older of two pieces, the device still
    computes the passes that were queued after this piece.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._queue: deque[tuple[torch.Tensor, int, Mark]] = deque()
        self._pieces: Counter[int] = Counter()
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory of all pieces that are held."""
        return self._held_bytes

    def add(self, gradient: torch.Tensor, mark: Mark) -> None:
        """Hold a gradient until the mark, which must come after the marks of all earlier gradients."""
        with self._lock:
            piece = storage_key(gradient)
            self._queue.append((gradient, piece, mark))
            if self._pieces[piece] == 0:
                self._held_bytes += gradient.untyped_storage().nbytes()
            self._pieces[piece] += 1

    def settle(self) -> None:
        """Free gradients whose copies are done; wait for further copies while gradients hold too much memory."""
        with self._lock:
            while self._queue and (self._too_much() or self._queue[0][2].done()):
                gradient, piece, mark = self._queue.popleft()
                mark.wait()
                self._pieces[piece] -= 1
                if self._pieces[piece] == 0:
                    del self._pieces[piece]
                    self._held_bytes -= gradient.untyped_storage().nbytes()
                del gradient

    def _too_much(self) -> bool:
        return len(self._pieces) > MOST and self._held_bytes > self._most_bytes
