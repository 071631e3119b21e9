"""Where masters and moments live between their uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from partool_kernels.host import Pool, zero
from partool_runtime.offload.buckets import Bucket


class StateStore(Protocol):
    """Masters and moments of buckets, as flat tensors: the master first."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Types of the tensors."""

    def expect(self, order: Sequence[int]) -> None:
        """Say in which order buckets will be opened next, so that they can be brought ahead of their use."""

    def open(self, bucket: int, *, write: bool) -> AbstractContextManager[tuple[torch.Tensor, ...]]:
        """Lend a bucket's tensors; with ``write`` what the user has changed is kept. One bucket at a time."""

    def flat(self) -> tuple[torch.Tensor, ...]:
        """Return all buckets' tensors as one each, current behind a :meth:`flush`; for checkpoints.

        What is written into them counts once :meth:`written` was called.
        """

    def written(self) -> None:
        """Take in what was written into :meth:`flat`."""

    def flush(self) -> None:
        """Return when everything that was changed is where it is kept; raises what went wrong on the way."""

    def close(self) -> None:
        """Give everything back."""


class MemoryStore:
    """Everything stays in host memory, near to the threads of ``pool`` that pass over it."""

    def __init__(self, buckets: Sequence[Bucket], dtypes: Sequence[torch.dtype], pool: Pool | None = None) -> None:
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
        """See :class:`StateStore`: all of it is here."""

    @contextmanager
    def open(self, bucket: int, *, write: bool) -> Iterator[tuple[torch.Tensor, ...]]:
        """See :class:`StateStore`."""
        yield tuple(tensor[self._spans[bucket]] for tensor in self._flat)

    def flat(self) -> tuple[torch.Tensor, ...]:
        """See :class:`StateStore`: the live tensors."""
        return self._flat

    def written(self) -> None:
        """See :class:`StateStore`."""

    def flush(self) -> None:
        """See :class:`StateStore`."""

    def close(self) -> None:
        """See :class:`StateStore`."""
