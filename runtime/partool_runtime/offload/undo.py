"""Undo copies of states that were updated before the step's scale or skip decision was known."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.host import Pool, accumulate, zero
from partool_kernels.host.types import Mode
from partool_runtime.offload.buckets import ALIGNED, Bucket


class Undo:
    """Holds undo copies of as many buckets' states as fit into ``arena_bytes`` bytes, allocated at the start.

    Buckets without a copy are updated only once the step's scale or skip decision is known. States are copied because
    an inverted Adam step would not restore the exact bits, and could not recover from an infinity.
    """

    def __init__(
        self, buckets: Sequence[Bucket], arena_bytes: int, dtypes: Sequence[torch.dtype], *, pool: Pool, mode: Mode
    ) -> None:
        most = sum(bucket.elements for bucket in buckets)
        room = min(most, arena_bytes // sum(dtype.itemsize for dtype in dtypes) // ALIGNED * ALIGNED)
        self._arena = [torch.empty(room, dtype=dtype) for dtype in dtypes]
        # Pages are touched here, so that a lack of memory ends the run at its start and not in its first step.
        for tensor in self._arena:
            zero([tensor], pool=pool)
        self._pool, self._mode = pool, mode
        self._used = 0
        self._kept: dict[int, slice] = {}

    def keep(self, bucket: Bucket, state: Sequence[torch.Tensor]) -> bool:
        """Copy a bucket's state if there is room for the copy; return whether the state was copied."""
        if self._used + bucket.elements > len(self._arena[0]):
            return False
        place = self._kept[bucket.index] = slice(self._used, self._used + bucket.elements)
        self._used = place.stop
        self._copy([kept[place] for kept in self._arena], state)
        return True

    def restore(self, bucket: Bucket, state: Sequence[torch.Tensor]) -> None:
        """Restore a bucket's state from its copy."""
        place = self._kept.pop(bucket.index)
        self._copy(state, [kept[place] for kept in self._arena])

    def clear(self) -> None:
        """Forget all copies."""
        self._used = 0
        self._kept.clear()

    def _copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        accumulate(to, source, first=True, pool=self._pool, mode=self._mode)
