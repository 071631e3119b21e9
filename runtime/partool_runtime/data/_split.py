"""Division of the corpus into training tokens and validation tokens, and division of both into samples.

A sample is a row of ``sequence_length + 1`` tokens; a row with fewer tokens is padded with :data:`PADDING`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from partool_runtime.data._order import mix
from partool_runtime.data._shards import Corpus
from partool_runtime.errors import ConfigurationError

I64 = npt.NDArray[np.int64]
PADDING = -1


class Samples(Protocol):
    """Samples, each a row of tokens that is read by its index."""

    count: int
    tokens: int

    def row(self, index: int) -> I64:
        """Return sample ``index`` as ``sequence_length + 1`` tokens, padded at the end."""

    def documents(self, index: int) -> I64:
        """Return the document number (from 0) of each token of a sample; padding belongs to the last document."""


class Packed:
    """Samples of joined ranges of the corpus; sample i holds tokens ``[i S, i S + S + 1)`` of the joined ranges.

    ``pad_last`` keeps the tokens after the last whole sample as a padded sample.
    """

    def __init__(self, corpus: Corpus, starts: I64, stops: I64, sequence_length: int, *, pad_last: bool) -> None:
        self._corpus = corpus
        self._starts = starts
        self._ends = np.cumsum(stops - starts)
        self._length = sequence_length
        self.tokens = int(self._ends[-1]) if len(starts) else 0
        full_rows, remainder = divmod(max(self.tokens - 1, 0), sequence_length)
        self.count = full_rows + (1 if pad_last and remainder else 0)

    def row(self, index: int) -> I64:
        """Return sample ``index``."""
        row = np.full(self._length + 1, PADDING, dtype=np.int64)
        for place, start, stop in self._stretches(index):
            row[place : place + stop - start] = self._corpus.read(start, stop)
        return row

    def documents(self, index: int) -> I64:
        """See :class:`Samples`."""
        numbers = [self._corpus.documents_of(start, stop) for _, start, stop in self._stretches(index)]
        document_ids = np.concatenate([np.empty(0, dtype=np.int64), *numbers])
        # Counted within the row: tokens held out for validation may lie between two documents.
        changes = np.zeros(self._length + 1, dtype=np.int64)
        changes[1 : len(document_ids)] = document_ids[1:] != document_ids[:-1]
        return np.cumsum(changes)

    def _stretches(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the row, first token, one past the last token) for each range of the corpus in a sample."""
        first = index * self._length
        last = min(first + self._length + 1, self.tokens)
        at = first
        for part in range(int(np.searchsorted(self._ends, first, side="right")), len(self._ends)):
            if at >= last:
                break
            stop = min(int(self._ends[part]), last)
            # Position `at` of the joined ranges is at `at + shift` in the corpus.
            shift = int(self._starts[part]) - (int(self._ends[part - 1]) if part else 0)
            yield at - first, at + shift, stop + shift
            at = stop


class Documents:
    """Samples that hold one document each, cut at the end or padded."""

    def __init__(self, corpus: Corpus, documents: I64, sequence_length: int) -> None:
        self._corpus = corpus
        self._documents = documents
        self._length = sequence_length
        self.count = len(documents)
        starts, stops = corpus.bounds(documents)
        self.tokens = int((stops - starts).sum())

    def row(self, index: int) -> I64:
        """Return sample ``index``."""
        starts, stops = self._corpus.bounds(self._documents[index : index + 1])
        start, stop = int(starts[0]), min(int(stops[0]), int(starts[0]) + self._length + 1)
        row = np.full(self._length + 1, PADDING, dtype=np.int64)
        row[: stop - start] = self._corpus.read(start, stop)
        return row

    def documents(self, index: int) -> I64:
        """See :class:`Samples`."""
        del index
        return np.zeros(self._length + 1, dtype=np.int64)


def split(corpus: Corpus, sequence_length: int, share: float, *, pack: bool) -> tuple[Samples, Samples]:
    """Return the training samples and the validation samples; no token is in both.

    The documents are divided into as many equal ranges as there are validation documents; a hash that does not depend
    on a seed chooses one document from each range. With ``pack``, the end of the corpus is held out instead if the
    corpus has too few documents, or if the chosen documents hold more than twice the validation's share of the tokens.
    Raises ConfigurationError PT604 if there would be no training sample or no validation sample.
    """
    divide = _split_packed if pack else _split_documents
    train, validation = divide(corpus, sequence_length, share)
    if train.count == 0:
        need = f"{sequence_length + 1} tokens" if pack else "a document of at least 2 tokens"
        raise ConfigurationError(
            "PT604",
            f"too little data: {train.tokens} tokens for training, a sequence needs {need}",
            _fewer_tokens_help(train.tokens, pack),
        )
    if share and validation.count == 0:
        raise ConfigurationError(
            "PT604",
            f"too little data: {share:g} of {corpus.documents} documents, {corpus.tokens} tokens, leave no validation",
            "raise data.validation, or set it to 0",
        )
    return train, validation


def _fewer_tokens_help(tokens: int, pack: bool) -> str:
    if pack and tokens >= 2:
        return f"set training.sequence_length to at most {tokens - 1}, or add data"
    return "add data"


def choose(count: int, strata: int) -> I64:
    """Return ascending numbers: a hash chooses one from each of ``strata`` equal parts of ``range(count)``."""
    numbers = np.arange(strata, dtype=np.int64)
    first = numbers * count // max(strata, 1)
    width = (numbers + 1) * count // max(strata, 1) - first
    return first + (mix(numbers.astype(np.uint64)) % width.astype(np.uint64)).astype(np.int64)


def _split_packed(corpus: Corpus, length: int, share: float) -> tuple[Samples, Samples]:
    starts, stops = corpus.bounds(choose(corpus.documents, math.floor(corpus.documents * share)))
    held_out = int((stops - starts).sum())
    if share and not 2 <= held_out <= 2 * share * corpus.tokens:
        starts = np.array([corpus.tokens - math.ceil(corpus.tokens * share)], dtype=np.int64)
        stops = np.array([corpus.tokens], dtype=np.int64)
    edge = np.array([0], dtype=np.int64)
    train_starts, train_stops = np.concatenate([edge, stops]), np.concatenate([starts, edge + corpus.tokens])
    kept = train_stops > train_starts
    train = Packed(corpus, train_starts[kept], train_stops[kept], length, pad_last=False)
    return train, Packed(corpus, starts, stops, length, pad_last=True)


def _split_documents(corpus: Corpus, length: int, share: float) -> tuple[Samples, Samples]:
    usable = np.concatenate([_usable(corpus, first) for first in range(0, max(corpus.documents, 1), 1 << 20)])
    wanted = max(1, math.floor(len(usable) * share)) if share and len(usable) > 1 else 0
    chosen = choose(len(usable), wanted)
    train = Documents(corpus, np.delete(usable, chosen), length)
    return train, Documents(corpus, usable[chosen], length)


def _usable(corpus: Corpus, first: int) -> I64:
    """Return the indices of documents with at least two tokens, out of the ``1 << 20`` documents from ``first`` on."""
    documents = np.arange(first, min(first + (1 << 20), corpus.documents), dtype=np.int64)
    starts, stops = corpus.bounds(documents)
    return documents[stops - starts >= 2]
