"""Buffers that hold keys and values as one message; the first dimension is tokens, so token stretches are contiguous.

A buffer is ``[S, B, K, D + V]``, for keys of width D and values of width V.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from partool.layout.sequence import Spans


class KeysForm:
    """Layout of keys and values of some heads in a buffer."""

    def __init__(self, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor) -> None:
        self._k, self._v, self._width = k_BKSD, v_BKSD, k_BKSD.shape[3]

    def packed(self) -> torch.Tensor:
        """Return a buffer filled with the keys and values."""
        buffer = self.room(self._k.shape[2])
        for part_SBKD, x_BKSD in zip(buffer.tensor_split([self._width], dim=3), (self._k, self._v), strict=True):
            part_SBKD.copy_(x_BKSD.permute(2, 0, 1, 3))
        return buffer

    def room(self, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialised buffer of ``size`` tokens."""
        batch, heads = self._k.shape[:2]
        return self._k.new_empty(size, batch, heads, self._width + self._v.shape[3], dtype=dtype or self._k.dtype)

    def pair(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a buffer's keys and values, or of their gradients, each ``[B, K, S, D]``."""
        x_BKSX = buffer.permute(1, 2, 0, 3)
        return x_BKSX[..., : self._width], x_BKSX[..., self._width :]


def rows(spans: Spans, parts: Spans) -> list[tuple[int, int]]:
    """Return the row ranges of the tokens ``parts`` in a buffer that holds the tokens ``spans``."""
    ranges, row = [], 0
    for start, stop in spans:
        ranges += [(row + low - start, row + high - start) for low, high in parts if start <= low < stop]
        row += stop - start
    return ranges


def picked(buffer: torch.Tensor, stretches: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Return the row ranges ``stretches`` of a buffer, concatenated."""
    parts = [buffer[low:high] for low, high in stretches]
    return parts[0] if len(parts) == 1 else torch.cat([buffer[:0], *parts])
