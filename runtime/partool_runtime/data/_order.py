"""The order of samples, which is another pseudo-random permutation in every epoch and is computed on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from partool.plan.packing import mix

_ROUNDS = 8

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


def permute(positions: I64, size: int, seed: int, epoch: int) -> I64:
    """Return the image of each position under the epoch's permutation of ``range(size)``; no permutation is stored.

    A keyed Feistel network permutes the numbers below the next power of four. Values outside ``range(size)`` are
    permuted again until they are in this range (cycle walking: Black and Rogaway, CT-RSA 2002), on average fewer than
    four times.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], keys, half_bits)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def samples_of(first: int, count: int, size: int, seed: int) -> I64:
    """Return the sample ids at the ``count`` positions from ``first`` on in the endless order over ``size`` samples.

    Each epoch begins at a multiple of ``size``, consists of ``size`` positions, and holds every sample once.
    """
    parts = []
    while count > 0:
        epoch, position = divmod(first, size)
        here = min(count, size - position)
        parts.append(permute(np.arange(position, position + here, dtype=np.int64), size, seed, epoch))
        first += here
        count -= here
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class SampleOrder(Protocol):
    """The endless order in which a run takes samples."""

    epoch: int
    """Number of samples of one epoch."""
    every_sample: bool
    """Whether an epoch holds every sample."""

    def ids(self, first: int, count: int) -> I64:
        """Return the samples at the ``count`` positions from ``first`` on."""


class Epochs:
    """Every epoch holds each sample once."""

    every_sample = True

    def __init__(self, size: int, seed: int) -> None:
        self.epoch = size
        self._seed = seed

    def ids(self, first: int, count: int) -> I64:
        """See :class:`SampleOrder`."""
        return samples_of(first, count, self.epoch, self._seed)


class Mixture:
    """Every epoch holds so many samples of each source; a source goes on in the next epoch where it was.

    The samples of all sources are numbered consecutively.
    """

    def __init__(self, sizes: Sequence[int], draws: Sequence[int], seed: int) -> None:
        self._sizes, self._draws, self._seed = list(sizes), list(draws), seed
        self._bases = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._ends = np.cumsum(draws, dtype=np.int64)
        self.epoch = int(self._ends[-1])
        self.every_sample = all(drawn >= size for drawn, size in zip(draws, sizes, strict=True))

    def ids(self, first: int, count: int) -> I64:
        """See :class:`SampleOrder`."""
        places = np.arange(first, first + count, dtype=np.int64)
        drawn = samples_of(first, count, self.epoch, self._seed)
        sources = np.searchsorted(self._ends, drawn, side="right")
        result = np.empty_like(drawn)
        for source in np.unique(sources).tolist():
            mine = sources == source
            begin = int(self._ends[source]) - self._draws[source]
            slots = places[mine] // self.epoch * self._draws[source] + drawn[mine] - begin
            result[mine] = self._bases[source] + self._of_source(source, slots)
        return result

    def _of_source(self, source: int, slots: I64) -> I64:
        """Return a source's samples at places of its own endless order, each epoch of which is a permutation."""
        size = self._sizes[source]
        epochs, places = np.divmod(slots, size)
        result = np.empty_like(slots)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            result[mine] = permute(places[mine], size, self._seed + source + 1, epoch)
        return result


def _round_keys(seed: int, epoch: int) -> U64:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: U64, keys: U64, half_bits: int) -> U64:
    low = np.uint64((1 << half_bits) - 1)
    upper, lower = values >> np.uint64(half_bits), values & low
    for key in keys:
        upper, lower = lower, upper ^ (mix(lower + key) >> np.uint64(64 - half_bits))
    return (upper << np.uint64(half_bits)) | lower
