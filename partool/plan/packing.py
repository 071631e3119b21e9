"""Which documents are trained on, which are held out, and which share a row. The two documents of a pair stay together.

Planning and training call the same functions, so that a plan counts the rows that the ranks train on. Rows are filled
by best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): documents in descending order of length,
each into the fullest row that has room for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partool.spec.data import MixedSource, Truncation

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """The documents of a corpus by their lengths, and where the tokens are that training predicts."""

    tokens: I64
    """Tokens of each document."""
    first_trained: I64
    """Place in its document, from 1 on, of the first token that is trained on; −1 if there is none."""
    last_trained: I64
    """Place in its document of the last token that is trained on; −1 if there is none."""

    @classmethod
    def of_text(cls, tokens: I64) -> Lengths:
        """Return documents of which every token is trained on."""
        return cls(tokens, np.where(tokens > 1, 1, -1), np.where(tokens > 1, tokens - 1, -1))


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Documents, or samples, by rows: row i holds ``documents[starts[i]:starts[i + 1]]``."""

    documents: I64
    starts: I64

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The rows of training and validation, and the samples that are not in them as they are.

    A sample is a document, or the two documents of a pair, which lie side by side in one row.
    """

    room: int
    """Tokens of a row: one more than the sequence length."""
    train: PackedRows
    validation: PackedRows
    begins: I64
    """Place in each document of the first token that rows hold."""
    kept: I64
    """Tokens of each document that rows hold; 0 for documents in no row."""
    truncated: int
    """Number of samples that lost tokens."""
    dropped: int
    """Number of samples that were longer than a row and left out."""
    untrained: int
    """Number of samples that are left out because no token of theirs, or of one side of a pair, is trained on."""
    per_sample: int = 1
    """Documents of a sample; 2 for pairs."""

    @property
    def samples(self) -> int:
        """Number of samples, in rows or not."""
        return len(self.kept) // self.per_sample


def arrange(
    lengths: Lengths, sequence_length: int, *, truncate: Truncation, pack: bool, validation: float, pairs: bool = False
) -> Arrangement:
    """Divide documents into rows of ``sequence_length + 1`` tokens; ``validation`` is the share that is held out.

    With ``pairs`` the documents 2j and 2j + 1 belong together. Raises ValueError for pairs of an odd number of
    documents.
    """
    room, size = sequence_length + 1, 2 if pairs else 1
    if len(lengths.tokens) % size:
        raise ValueError(f"{len(lengths.tokens)} documents are not pairs")
    limit = _limits(lengths.tokens, room) if pairs else np.full_like(lengths.tokens, room)
    kept = np.minimum(lengths.tokens, limit)
    begins = lengths.tokens - kept if truncate == "left" else np.zeros_like(kept)
    # No document's first token is predicted.
    trained = (lengths.first_trained > 0) & (lengths.last_trained > begins) & (lengths.first_trained < begins + kept)
    long = (lengths.tokens > limit).reshape(-1, size).any(1)
    drops, useful = long & (truncate == "drop"), trained.reshape(-1, size).all(1)
    kept = np.where(np.repeat(useful & ~drops, size), kept, 0)
    sizes = kept.reshape(-1, size).sum(1)
    usable = np.flatnonzero(sizes)
    chosen = choose(len(usable), _held_out(len(usable), validation))
    fill = _packed if pack else _apart
    return Arrangement(
        room,
        _of_documents(fill(np.delete(usable, chosen), sizes, room), size),
        _of_documents(fill(usable[chosen], sizes, room), size),
        begins,
        kept,
        int((long & (sizes > 0)).sum()),
        int(drops.sum()),
        int((~useful & ~drops).sum()),
        size,
    )


def _limits(tokens: I64, room: int) -> I64:
    """Return how many tokens of each document of a pair fit into a row: half of it, or what the other one leaves."""
    other = tokens.reshape(-1, 2)[:, ::-1].reshape(-1)
    return np.maximum(room // 2, room - other)


def _of_documents(samples: PackedRows, size: int) -> PackedRows:
    """Return rows of samples as rows of documents, of which each sample has ``size``."""
    documents = (samples.documents[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)
    return PackedRows(documents, samples.starts * size)


def _held_out(count: int, share: float) -> int:
    return max(1, math.floor(count * share)) if share and count > 1 else 0


def _apart(samples: I64, sizes: I64, room: int) -> PackedRows:
    del sizes, room
    return PackedRows(samples, np.arange(len(samples) + 1, dtype=np.int64))


def _packed(samples: I64, sizes: I64, room: int) -> PackedRows:
    """Fill rows with samples, the longest first; rows are numbered in the order in which they are opened."""
    order = samples[np.argsort(-sizes[samples], kind="stable")]
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(room + 1)]  # by the number of tokens that they have room for
    free = 0  # bit r is set if a row has room for r tokens
    for sample, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = free >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[left].pop()
            if not open_rows[left]:
                free &= ~(1 << left)
            rows[row].append(sample)
        else:
            row, left = len(rows), room
            rows.append([sample])
        left -= size
        if left > 1:  # a sample has at least two tokens
            open_rows[left].append(row)
            free |= 1 << left
    return _joined(rows)


def _joined(rows: Sequence[Sequence[int]]) -> PackedRows:
    def flat() -> Iterator[int]:
        for row in rows:
            yield from row

    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    return PackedRows(np.fromiter(flat(), dtype=np.int64, count=int(starts[-1])), starts)


def drawn(rows: Sequence[int], sources: Sequence[MixedSource]) -> list[int]:
    """Return how many rows one epoch of a mixture takes from each source, of which one pass has so many ``rows``.

    With weights, as many as the source allows that would be used up first; at least one of each.
    """
    if any(source.weight is not None for source in sources):
        weights = [source.weight or 0.0 for source in sources]
        most = min(count * sum(weights) / weight for count, weight in zip(rows, weights, strict=True) if weight)
        return [max(1, math.floor(most * weight / sum(weights) + 1e-9)) for weight in weights]
    return [max(1, round(count * (source.epochs or 1.0))) for count, source in zip(rows, sources, strict=True)]


def mix(x: U64) -> U64:
    """Return a hash of each value in ``x`` by the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose(count: int, strata: int) -> I64:
    """Return ascending numbers: a hash chooses one from each of ``strata`` equal parts of ``range(count)``."""
    numbers = np.arange(strata, dtype=np.int64)
    first = numbers * count // max(strata, 1)
    width = (numbers + 1) * count // max(strata, 1) - first
    return first + (mix(numbers.astype(np.uint64)) % width.astype(np.uint64)).astype(np.int64)
