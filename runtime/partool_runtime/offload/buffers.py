"""Host staging buffers for gradients and weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partool_runtime.errors import ConfigurationError
from partool_runtime.offload.buckets import Bucket
from partool_runtime.offload.lanes import Mark
from partool_runtime.offload.memory import HostMemory
from partool_runtime.torch_internals.tensors import storage_key

SPARE = 2
"""Number of extra buffers for gradients, in addition to a step's buffers: one is filled while another is processed."""
WEIGHTS = 2
"""Number of buffers for weights: one is written while another is copied to the device."""


@dataclass(slots=True)
class Ready:
    """A buffer for weights, and the mark after the copy that reads the buffer."""

    tensor: torch.Tensor
    mark: Mark | None = None


class Buffers:
    """Host memory of the engine besides the state, all of it allocated at the start.

    With one micro-batch a step holds all of its gradients until their norm is known, which takes a buffer per bucket.
    Up to ``spare`` more buffers are allocated as far as ``pinned_bytes`` allows (0 means no limit). If ``totals`` is
    given, the gradients of several micro-batches are summed in unpinned memory of the type ``totals``, and ``spare``
    buffers suffice.

    ``memory`` allocates all pinned memory of the rank, and memory that it has already allocated counts towards
    ``pinned_bytes``; without ``memory`` the buffers are unpinned.

    Raises ConfigurationError PT660 if ``pinned_bytes`` is too small for a step.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        gradients: torch.dtype,
        weights: torch.dtype,
        totals: torch.dtype | None,
        memory: HostMemory | None = None,
        spare: int = SPARE,
        pinned_bytes: int = 0,
    ) -> None:
        self._most = max((bucket.elements for bucket in buckets), default=0)
        self._gradients = gradients
        self._memory = memory or HostMemory(pinned=False)
        self.accumulates = totals is not None
        """Whether a step has several micro-batches, whose gradients are summed in host memory."""
        least = min(len(buckets), 1) if self.accumulates else len(buckets)
        count = self._affordable(least, spare if self.accumulates else least + spare, weights, pinned_bytes)
        self._lock = threading.Lock()
        self._free = [self._memory.tensor(self._most, gradients, "gradients") for _ in range(count)]
        self._weights = [Ready(self._memory.tensor(self._most, weights, "weights")) for _ in range(WEIGHTS)]
        self._totals = [torch.empty(b.elements, dtype=totals) for b in buckets] if totals is not None else []
        self._turn = 0
        self._overdue: set[int] = set()

    def _affordable(self, least: int, wanted: int, weights: torch.dtype, pinned_bytes: int) -> int:
        """Return the number of buffers for gradients that fit into ``pinned_bytes``, at most ``wanted``."""
        if pinned_bytes == 0 or self._most == 0:
            return wanted
        free_bytes = pinned_bytes - self._memory.held_bytes
        each, fixed = self._most * self._gradients.itemsize, WEIGHTS * self._most * weights.itemsize
        if fixed + least * each > free_bytes:
            raise ConfigurationError(
                "PT660",
                f"{max(free_bytes, 0) / 2**30:.2f} GiB of pinned memory, of {pinned_bytes / 2**30:.2f}, do not hold "
                f"{least} buckets of gradients and {WEIGHTS} of weights: "
                f"they are {(fixed + least * each) / 2**30:.2f} GiB",
                "a larger parallel.offload.pinned_gib, or a smaller bucket_mib",
            )
        return min(wanted, (free_bytes - fixed) // each)

    @property
    def gradient_bytes(self) -> int:
        """Size in bytes of one buffer for gradients."""
        return self._most * self._gradients.itemsize

    @property
    def spare(self) -> bool:
        """Whether a buffer for gradients is free."""
        return bool(self._free)

    def take(self) -> torch.Tensor | None:
        """Return a free buffer for a bucket's gradients, or None if no buffer is free."""
        with self._lock:
            return self._free.pop() if self._free else None

    def make(self) -> torch.Tensor:
        """Allocate one more buffer. To avoid a deadlock it is not pinned, so copies to it block the host."""
        with torch.inference_mode(False):
            buffer = torch.empty(self._most, dtype=self._gradients)
        self._overdue.add(storage_key(buffer))
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back a buffer for gradients; ``buffer`` is the whole buffer or its used part."""
        if len(buffer) != self._most:
            buffer = buffer.as_strided((self._most,), (1,))
        with self._lock:
            # The list is used from its end: unpinned buffers go first, to be reused last.
            self._free.insert(0 if storage_key(buffer) in self._overdue else len(self._free), buffer)

    def total(self, bucket: int) -> torch.Tensor:
        """Return the tensor in which a bucket's gradients are summed."""
        return self._totals[bucket]

    def weights(self) -> Ready:
        """Return a buffer for a bucket's weights, once the copy that reads it is done."""
        self._turn = (self._turn + 1) % len(self._weights)
        ready = self._weights[self._turn]
        if ready.mark is not None:
            ready.mark.wait()
        return ready
