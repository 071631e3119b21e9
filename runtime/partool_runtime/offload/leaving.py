"""Gradients that are still on the device because their copies to the host are under way."""

from __future__ import annotations

import threading
from collections import Counter, deque

import torch

from partool_runtime.offload.lanes import Mark

MOST = 2
"""Pieces of memory that may be held: what was reduced last, and what was reduced before it."""


class Leaving:
    """Holds gradients until their copies are done, and holds the host back where that would fill the device.

    The host gives work to a device far ahead of it. Gradients that wait for a link would then pile up, all of the
    model's in the end, though they are to save just that memory. What FSDP2 has reduced together is one piece of
    memory: of these :data:`MOST` may be held, or as many as ``most_bytes`` hold. With the older of two on its way, the
    device still has the passes of the younger one to work on while the host waits.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._queue: deque[tuple[torch.Tensor, int, Mark]] = deque()
        self._pieces: Counter[int] = Counter()
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of all pieces."""
        return self._held_bytes

    def add(self, gradient: torch.Tensor, mark: Mark) -> None:
        """Hold a gradient until the mark, which is behind those of what was added before."""
        with self._lock:
            storage = gradient.untyped_storage()
            self._queue.append((gradient, storage.data_ptr(), mark))
            if self._pieces[storage.data_ptr()] == 0:
                self._held_bytes += storage.nbytes()
            self._pieces[storage.data_ptr()] += 1

    def settle(self) -> None:
        """Let go of what has left; wait while there is too much."""
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
