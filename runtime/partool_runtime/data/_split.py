"""DataDivision of the corpus into training tokens and validation tokens, and division of both into samples.

A sample is a row of ``sequence_length + 1`` tokens; a row with fewer tokens is padded with :data:`PADDING`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from partool.plan.packing import Arrangement, PackedRows, arrange, choose
from partool.spec.data import DataSpec
from partool_runtime.errors import ConfigurationError
from partool_runtime.tokens.shards import Corpus

I64 = npt.NDArray[np.int64]
PADDING = -1


class Samples(Protocol):
    """Samples, each a row of tokens that is read by its index."""

    count: int
    tokens: int

    def row(self, index: int) -> I64:
        """Return sample ``index`` as ``sequence_length + 1`` tokens, padded at the end."""

    masks: bool
    """Whether some tokens are not trained on."""

    def documents(self, index: int) -> I64:
        """Return the document number (from 0) of each token of a sample; padding belongs to the last document."""

    def loss(self, index: int) -> I64:
        """Return 1 for each token of a sample that is trained on, else 0."""

    def numbers(self, index: int) -> I64:
        """Return the corpus's numbers of the documents in a sample, in order."""


class Packed:
    """Samples of joined ranges of the corpus; sample i holds tokens ``[i S, i S + S + 1)`` of the joined ranges.

    ``pad_last`` keeps the tokens after the last whole sample as a padded sample.
    """

    masks = False

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

    def loss(self, index: int) -> I64:
        """See :class:`Samples`."""
        del index
        return np.ones(self._length + 1, dtype=np.int64)

    def numbers(self, index: int) -> I64:
        """See :class:`Samples`."""
        return np.concatenate(
            [np.unique(self._corpus.documents_of(start, stop)) for _, start, stop in self._stretches(index)]
        )

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


class WholeDocuments:
    """Samples that hold whole documents, one or several each, padded at the end; long documents are cut."""

    def __init__(self, corpus: Corpus, arranged: Arrangement, rows: PackedRows) -> None:
        self._corpus = corpus
        self._arranged = arranged
        self._rows = rows
        self.count = rows.count
        self.tokens = int(arranged.kept[rows.documents].sum())
        self.masks = corpus.masks

    def row(self, index: int) -> I64:
        """Return sample ``index``."""
        row = np.full(self._arranged.room, PADDING, dtype=np.int64)
        for place, start, stop in self._stretches(index):
            row[place : place + stop - start] = self._corpus.read(start, stop)
        return row

    def loss(self, index: int) -> I64:
        """See :class:`Samples`."""
        row = np.zeros(self._arranged.room, dtype=np.int64)
        for place, start, stop in self._stretches(index):
            row[place : place + stop - start] = self._corpus.loss(start, stop)
        return row

    def documents(self, index: int) -> I64:
        """See :class:`Samples`."""
        changes = np.zeros(self._arranged.room, dtype=np.int64)
        for place, _, _ in self._stretches(index):
            changes[place] = place > 0
        return np.cumsum(changes)

    def numbers(self, index: int) -> I64:
        """See :class:`Samples`."""
        return self._rows.documents[self._rows.starts[index] : self._rows.starts[index + 1]]

    def _stretches(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the row, first token, one past the last token) for each document of a sample."""
        documents = self.numbers(index)
        starts, _ = self._corpus.bounds(documents)
        place = 0
        for start, begin, size in zip(
            starts.tolist(),
            self._arranged.begins[documents].tolist(),
            self._arranged.kept[documents].tolist(),
            strict=True,
        ):
            yield place, start + begin, start + begin + size
            place += size


class Joined:
    """The samples of several sources, numbered consecutively.

    ``first`` are the numbers, in the run's corpus, of the first document of each source.
    """

    def __init__(self, sources: Sequence[Samples], first: Sequence[int]) -> None:
        self._sources, self._first = sources, first
        self._ends = np.cumsum([source.count for source in sources], dtype=np.int64)
        self.count = int(self._ends[-1])
        self.tokens = sum(source.tokens for source in sources)
        self.masks = any(source.masks for source in sources)

    def row(self, index: int) -> I64:
        """Return sample ``index``."""
        source, place = self._place(index)
        return source.row(place)

    def documents(self, index: int) -> I64:
        """See :class:`Samples`."""
        source, place = self._place(index)
        return source.documents(place)

    def loss(self, index: int) -> I64:
        """See :class:`Samples`."""
        source, place = self._place(index)
        return source.loss(place)

    def numbers(self, index: int) -> I64:
        """Return the documents' numbers in the corpus of all sources; see :class:`Samples`."""
        source, place = self._place(index)
        return source.numbers(place) + self._first[self._source_of(index)]

    def _place(self, index: int) -> tuple[Samples, int]:
        number = self._source_of(index)
        return self._sources[number], index - int(self._ends[number]) + self._sources[number].count

    def _source_of(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))


class OneDocument:
    """Samples whose tokens attend to all of their sequence, where other samples of the run number their documents."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.count, self.tokens, self.masks = samples.count, samples.tokens, samples.masks

    def row(self, index: int) -> I64:
        """See :class:`Samples`."""
        return self._samples.row(index)

    def documents(self, index: int) -> I64:
        """Return the same number for all tokens."""
        return np.zeros(len(self._samples.row(index)), dtype=np.int64)

    def loss(self, index: int) -> I64:
        """See :class:`Samples`."""
        return self._samples.loss(index)

    def numbers(self, index: int) -> I64:
        """See :class:`Samples`."""
        return self._samples.numbers(index)


@dataclass(frozen=True, slots=True)
class DataDivision:
    """The samples of training and of validation, and notes about documents that are in neither as they are."""

    train: Samples
    validation: Samples
    notes: tuple[str, ...] = ()


def split(corpus: Corpus, sequence_length: int, data: DataSpec) -> DataDivision:
    """Return the training samples and the validation samples; no token is in both.

    The documents are divided into as many equal ranges as there are validation documents; a hash that does not depend
    on a seed chooses one document from each range. Where texts are packed, the end of the corpus is held out instead if
    the corpus has too few documents, or if the chosen documents hold more than twice the validation's share of the
    tokens. Raises ConfigurationError PT604 if there would be no training sample or no validation sample.
    """
    streams = data.pack and data.is_text
    if streams:
        division = DataDivision(*_split_stream(corpus, sequence_length, data.validation))
    else:
        division = _split_documents(corpus, sequence_length, data)
    train, validation, share = division.train, division.validation, data.validation
    if train.count == 0:
        need = f"{sequence_length + 1} tokens" if streams else "a document of at least 2 tokens"
        raise ConfigurationError(
            "PT604",
            f"too little data: {train.tokens} tokens for training, a sequence needs {need}",
            "; ".join(division.notes) or _fewer_tokens_help(train.tokens, streams),
        )
    if share and validation.count == 0:
        raise ConfigurationError(
            "PT604",
            f"too little data: {share:g} of {corpus.documents} documents, {corpus.tokens} tokens, leave no validation",
            "raise data.validation, or set it to 0",
        )
    return division


def validation_samples(corpus: Corpus, sequence_length: int, data: DataSpec, name: str) -> DataDivision:
    """Return the samples of the named set whose section is ``data``; none are for training.

    Each document is in one sample at least: the last sample of packed texts is filled up. Raises ConfigurationError
    PT604 if there is no sample.
    """
    if data.pack and data.is_text:
        edges = np.array([0], dtype=np.int64), np.array([corpus.tokens], dtype=np.int64)
        division = DataDivision(_nothing(corpus), Packed(corpus, *edges, sequence_length, pad_last=True))
    else:
        arranged = _split_documents(corpus, sequence_length, data)
        division = DataDivision(_nothing(corpus), arranged.train, arranged.notes)
    if division.validation.count == 0:
        message = f"too little data: the set {name} has {corpus.tokens} tokens, and needs a document of at least 2"
        help = "; ".join(division.notes) or f"add data, or drop data.validation_sets.{name}"
        raise ConfigurationError("PT604", message, help)
    return division


def _nothing(corpus: Corpus) -> Samples:
    nowhere = np.empty(0, dtype=np.int64)
    return Packed(corpus, nowhere, nowhere, 1, pad_last=False)


def _fewer_tokens_help(tokens: int, pack: bool) -> str:
    if pack and tokens >= 2:
        return f"set training.sequence_length to at most {tokens - 1}, or add data"
    return "add data"


def _split_stream(corpus: Corpus, length: int, share: float) -> tuple[Samples, Samples]:
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


def _split_documents(corpus: Corpus, length: int, data: DataSpec) -> DataDivision:
    if data.is_preference and corpus.documents % 2:
        message = f"{corpus.documents} documents are not pairs of a chosen and a rejected answer"
        raise ConfigurationError("PT602", message, "preferences are read from JSONL, Parquet or Arrow files")
    arranged = arrange(
        corpus.lengths(),
        length,
        truncate=data.truncate,
        pack=data.pack,
        validation=data.validation,
        pairs=data.is_preference,
    )
    train, validation = (WholeDocuments(corpus, arranged, rows) for rows in (arranged.train, arranged.validation))
    return DataDivision(train, validation, tuple(_losses(arranged, corpus, data)))


def _losses(arranged: Arrangement, corpus: Corpus, data: DataSpec) -> Iterator[str]:
    """Yield what conversations lose; texts that are not packed are cut without a note."""
    if data.is_text:
        return
    of = f"of {arranged.samples:,} {'pairs' if data.is_preference else 'samples'}"
    if arranged.truncated:
        side = "end" if data.truncate == "right" else "beginning"
        yield f"PT661: {arranged.truncated:,} {of} are longer than a sequence and lose their {side}"
    if arranged.dropped:
        yield f"PT661: {arranged.dropped:,} {of} are longer than a sequence and are left out"
    if arranged.untrained:
        first = next((shard.first_masked for shard in corpus.shards if shard.first_masked), "")
        where = f"; the first is {first}" if first else ""
        what = "an answer without a token" if data.is_preference else "no token"
        yield f"PT662: {arranged.untrained:,} {of} have {what} to train on and are left out{where}"
