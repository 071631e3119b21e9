"""Allocator of the host memory that devices copy to and from; it counts bytes per purpose and enforces a limit."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any
from weakref import finalize

import torch

from partool_runtime.errors import ConfigurationError

PAGE_BYTES = 4096
"""Alignment of memory in bytes: the unit of direct disk transfers and of pinning."""
_MOST_LOST = 1 / 8
"""Largest wasted share of an allocation; PyTorch's pinned allocator rounds to powers of two and wastes up to half."""
_log = logging.getLogger(__name__)


class HostMemory:
    """Allocates host memory, pinned where the device copies asynchronously.

    All memory should be taken before the first collective: pinning waits for the device, and if the device runs a
    collective that waits for another rank, the ranks may deadlock. Memory taken after :meth:`freeze` is not pinned, so
    copies are slower; this memory is counted, too, and a warning is logged once. Any thread may take memory. Memory is
    freed only by :meth:`close`, so callers keep memory that they need repeatedly.
    """

    def __init__(self, *, pinned: bool, limit_bytes: int = 0) -> None:
        """``limit_bytes`` is the maximum number of bytes held at once; 0 means no limit."""
        self.pinned, self._limit_bytes = pinned, limit_bytes
        self._taken_bytes: Counter[str] = Counter()
        self._registered: list[torch.Tensor] = []
        finalize(self, _unregister, self._registered).atexit = False
        self._frozen = False
        self._lock = threading.Lock()
        self.late_bytes = 0
        """Bytes taken after :meth:`freeze`."""

    @property
    def held_bytes(self) -> int:
        """Bytes held for all purposes."""
        return sum(self._taken_bytes.values())

    @property
    def purposes(self) -> dict[str, int]:
        """Number of bytes held for each purpose."""
        return {what: size for what, size in self._taken_bytes.items() if size}

    def take(self, size_bytes: int, what: str) -> torch.Tensor:
        """Return ``size_bytes`` of uninitialised uint8 memory, aligned to a page and counted under ``what``.

        Raises :class:`ConfigurationError`: PT675 beyond the limit, PT676 where the system refuses the request.
        """
        with self._lock:
            if self._limit_bytes and self.held_bytes + size_bytes > self._limit_bytes:
                raise self._beyond(size_bytes, what)
            self._taken_bytes[what] += size_bytes
            if self._frozen:
                self._note_late(size_bytes, what)
        try:
            return self.allocate(size_bytes)
        except RuntimeError as error:
            with self._lock:
                self._taken_bytes[what] -= size_bytes
            raise self._refused(size_bytes, what) from error

    def tensor(self, elements: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """Return an uninitialised flat tensor in memory that :meth:`take` allocates."""
        return self.take(elements * dtype.itemsize, what).view(dtype)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return memory for :meth:`take`, without counting it."""
        pins = self.pinned and not self._frozen
        with torch.inference_mode(False):
            if pins and _rounded(size_bytes) - size_bytes <= _MOST_LOST * size_bytes:
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            memory = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8)
            first = -memory.data_ptr() % PAGE_BYTES
            block = memory[first : first + size_bytes]
            if pins and size_bytes:
                torch.cuda.check_error(int(_cuda().cudaHostRegister(block.data_ptr(), size_bytes, 0)))
                with self._lock:
                    self._registered.append(block)
            return block

    def freeze(self) -> None:
        """Mark that collectives begin: memory taken from now on is not pinned."""
        self._frozen = True

    def close(self) -> None:
        """Free all memory; no copy to or from the memory may be in flight."""
        with self._lock:
            _unregister(self._registered)
            self._taken_bytes.clear()

    def _note_late(self, size_bytes: int, what: str) -> None:
        if not self.late_bytes:
            _log.warning("host memory for %s is taken during the run (%d bytes): it was not foreseen", what, size_bytes)
        self.late_bytes += size_bytes

    def _beyond(self, size_bytes: int, what: str) -> ConfigurationError:
        message = f"{_gib(size_bytes)} of host memory for {what} would exceed the limit of {_gib(self._limit_bytes)}"
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in self._taken_bytes.most_common())
        return ConfigurationError("PT675", f"{message}; held: {listed or 'nothing'}", _LIMIT_HELP)

    def _refused(self, size_bytes: int, what: str) -> ConfigurationError:
        kind = "pinned host memory" if self.pinned else "host memory"
        message = f"the system does not give {_gib(size_bytes)} of {kind} for {what}; held: {_gib(self.held_bytes)}"
        return ConfigurationError("PT676", message, _SYSTEM_HELP)


def _unregister(blocks: list[torch.Tensor]) -> None:
    """Unpin blocks that were pinned in place; call it before the memory of the blocks is freed."""
    while blocks:
        torch.cuda.check_error(int(_cuda().cudaHostUnregister(blocks.pop().data_ptr())))


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_LIMIT_HELP = "raise parallel.offload.pinned_gib, or lower parallel.offload.bucket_mib or buffers"
_SYSTEM_HELP = "raise the container's memory limit and `ulimit -l`, or offload less"


def _rounded(size_bytes: int) -> int:
    return 1 << max(0, size_bytes - 1).bit_length()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g} GiB"
