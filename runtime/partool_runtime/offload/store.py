"""Stores of masters and moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from partool_kernels.host import Pool, zero
from partool_runtime.offload.buckets import Bucket


class StateStore(Protocol):
    """Masters and moments of buckets, as flat tensors, masters first."""

    notes: tuple[str, ...]
    """Notes for the run's log."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Type of the tensor of each role: the master first, then each moment."""

    def expect(self, order: Sequence[int]) -> None:
        """Announce the order in which buckets will be opened next, so that the store can prefetch buckets."""

    def open(self, bucket: int, *, write: bool) -> AbstractContextManager[tuple[torch.Tensor, ...]]:
        """Lend a bucket's tensors within the context; if ``write``, changes are kept. Open one bucket at a time."""

    def flat(self) -> tuple[torch.Tensor, ...]:
        """Return one flat tensor per role that covers all buckets, for checkpoints; it is current after :meth:`flush`.

        Writes to these tensors take effect with :meth:`written`.
        """

    def written(self) -> None:
        """Apply the changes that were written to the tensors of :meth:`flat`."""

    def flush(self) -> None:
        """Wait until all changes are stored; raises errors of earlier writes."""

    def close(self) -> None:
        """Free all memory and files."""


class MemoryStore:
    """Store in host memory; each part is on the memory node of the thread of ``pool`` that updates the part."""

    def __init__(self, buckets: Sequence[Bucket], dtypes: Sequence[torch.dtype], pool: Pool | None = None) -> None:
        self.notes: tuple[str, ...] = ()
        elements = buckets[-1].first + buckets[-1].elements if buckets else 0
        self._flat = tuple(torch.empty(elements, dtype=dtype) for dtype in dtypes)
        self._spans = [slice(bucket.first, bucket.first + bucket.elements) for bucket in buckets]
        for span in self._spans:
            for tensor in self._flat:
                zero([tensor[span]], pool=pool)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """See :class:`StateStore`."""
        return tuple(tensor.dtype for tensor in self._flat)

    def expect(self, order: Sequence[int]) -> None:
        """See :class:`StateStore`. Do nothing, since all buckets are in memory."""

    @contextmanager
    def open(self, bucket: int, *, write: bool) -> Iterator[tuple[torch.Tensor, ...]]:
        """See :class:`StateStore`."""
        yield tuple(tensor[self._spans[bucket]] for tensor in self._flat)

    def flat(self) -> tuple[torch.Tensor, ...]:
        """See :class:`StateStore`. The tensors are the live state."""
        return self._flat

    def written(self) -> None:
        """See :class:`StateStore`."""

    def flush(self) -> None:
        """See :class:`StateStore`."""

    def close(self) -> None:
        """See :class:`StateStore`."""
