"""Memory-mapped token files, and the corpus that they form together."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from partool.plan.packing import Lengths
from partool.plan.records import DataError
from partool.plan.token_files import check_size, read_sidecar
from partool_runtime.errors import ConfigurationError

Read = TypeVar("Read")
I64 = npt.NDArray[np.int64]

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_BLOCK_BYTES = 1 << 20
_MAX_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Shard:
    """Tokens of some documents, memory-mapped; document i is ``tokens[documents[i]:documents[i + 1]]``."""

    tokens: npt.NDArray[Any]
    documents: I64
    path: Path
    vocab: int | None = None
    """Exclusive upper bound of the tokens, if the file states a bound."""
    left_out: int = 0
    """Number of documents of the source text that have no token; such documents are not in ``documents``."""
    first_left_out: str = ""
    """File (and line) of the first document without a token, if known."""
    loss: npt.NDArray[np.uint8] | None = None
    """1 for each token that is trained on; None if all are."""
    trained: I64 | None = None
    """First and last token of each document that is trained on, counted from the document's first; −1 without one."""
    masked: int = 0
    """Number of documents of which no token is trained on."""
    first_masked: str = ""
    """File and line of the first document of which no token is trained on, if known."""
    notes: tuple[str, ...] = ()
    """What is doubtful about the tokens, in sentences."""

    def lengths(self) -> Lengths:
        """Return the lengths of the documents."""
        tokens = np.diff(np.asarray(self.documents)).astype(np.int64)
        if self.trained is None:
            return Lengths.of_text(tokens)
        return Lengths(tokens, np.asarray(self.trained[:, 0]), np.asarray(self.trained[:, 1]))


class Corpus:
    """Concatenated shards, whose tokens and documents are numbered consecutively."""

    def __init__(self, shards: list[Shard], vocab: int) -> None:
        self.shards = shards
        self.vocab = vocab
        self._token_ends = np.cumsum([len(shard.tokens) for shard in shards], dtype=np.int64)
        self._document_ends = np.cumsum([len(shard.documents) - 1 for shard in shards], dtype=np.int64)
        self.tokens = int(self._token_ends[-1])
        self.documents = int(self._document_ends[-1])

    def read(self, start: int, stop: int) -> I64:
        """Return the tokens in ``[start, stop)``; raises ConfigurationError PT605 for tokens outside the vocabulary."""
        parts = []
        first = int(np.searchsorted(self._token_ends, start, side="right"))
        for index in range(first, len(self.shards)):
            base = int(self._token_ends[index]) - len(self.shards[index].tokens)
            if base >= stop:
                break
            part = self.shards[index].tokens[max(start - base, 0) : stop - base].astype(np.int64)
            self._check(part, self.shards[index].path)
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @property
    def masks(self) -> bool:
        """Whether some tokens are not trained on."""
        return any(shard.loss is not None for shard in self.shards)

    def loss(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return 1 for each token in ``[start, stop)`` that is trained on, else 0."""
        parts = []
        first = int(np.searchsorted(self._token_ends, start, side="right"))
        for index in range(first, len(self.shards)):
            shard = self.shards[index]
            base = int(self._token_ends[index]) - len(shard.tokens)
            if base >= stop:
                break
            here = slice(max(start - base, 0), min(stop - base, len(shard.tokens)))
            ones = np.ones(here.stop - here.start, dtype=np.uint8)
            parts.append(ones if shard.loss is None else np.asarray(shard.loss[here]))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)

    def lengths(self) -> Lengths:
        """Return the lengths of all documents."""
        each = [shard.lengths() for shard in self.shards]
        return Lengths(
            np.concatenate([one.tokens for one in each]),
            np.concatenate([one.first_trained for one in each]),
            np.concatenate([one.last_trained for one in each]),
        )

    def bounds(self, documents: I64) -> tuple[I64, I64]:
        """Return the index of the first token of each document, and the index after the last token of each document."""
        starts, stops = np.empty_like(documents), np.empty_like(documents)
        owner = np.searchsorted(self._document_ends, documents, side="right")
        for index in np.unique(owner):
            shard, mine = self.shards[index], owner == index
            local = documents[mine] - (self._document_ends[index] - (len(shard.documents) - 1))
            base = self._token_ends[index] - len(shard.tokens)
            starts[mine] = shard.documents[local] + base
            stops[mine] = shard.documents[local + 1] + base
        return starts, stops

    def documents_of(self, start: int, stop: int) -> I64:
        """Return the document number of each token in ``[start, stop)``."""
        places = np.arange(start, stop, dtype=np.int64)
        numbers = np.empty_like(places)
        owner = np.searchsorted(self._token_ends, places, side="right")
        for index in np.unique(owner):
            shard, mine = self.shards[index], owner == index
            local = places[mine] - (self._token_ends[index] - len(shard.tokens))
            first = self._document_ends[index] - (len(shard.documents) - 1)
            numbers[mine] = np.searchsorted(shard.documents, local, side="right") - 1 + first
        return numbers

    def _check(self, part: I64, path: Path) -> None:
        if part.size and (int(part.max()) >= self.vocab or int(part.min()) < 0):
            bad = int(part.max()) if int(part.max()) >= self.vocab else int(part.min())
            raise ConfigurationError(
                "PT605", f"{path} holds token {bad}, the model's vocabulary is {self.vocab}", _vocab_help(bad)
            )


def _vocab_help(bad: int) -> str:
    return f"set model.vocab to at least {bad + 1}" if bad >= 0 else "the file does not match its index"


def open_tokens(path: Path) -> Shard:
    """Open a ``.bin`` file of uint16 or uint32 (little-endian) tokens by the ``.json`` sidecar of the same name.

    The sidecar holds ``dtype``, ``count`` (number of tokens), ``vocab``, and optionally ``documents``, the name of a
    file in the same folder. The ``documents`` file holds the position of every document's first token, then ``count``,
    as little-endian int64. Without ``documents`` all tokens are one document. Raises ConfigurationError PT602 where
    sidecar and files disagree.
    """
    sidecar = as_configuration(read_sidecar, path)
    count = sidecar.count
    tokens = map_array(path, _DTYPES[sidecar.dtype], 0, count, exact=True)
    documents = np.array([0, count] if count else [0], dtype=np.int64)
    if sidecar.documents is not None:
        documents = _open_documents(path.with_name(sidecar.documents), count)
    loss = trained = None
    if sidecar.loss is not None:
        loss = map_array(path.with_name(sidecar.loss), np.dtype(np.uint8), 0, count, exact=True)
    if sidecar.trained is not None:
        size = 2 * (len(documents) - 1)
        trained = map_array(path.with_name(sidecar.trained), np.dtype("<i8"), 0, size, exact=True).reshape(-1, 2)
    return Shard(
        tokens,
        documents,
        path,
        sidecar.vocab,
        sidecar.left_out,
        sidecar.first_left_out,
        loss,
        trained,
        sidecar.masked,
        sidecar.first_masked,
        sidecar.notes,
    )


def as_configuration(read: Callable[[Path], Read], path: Path) -> Read:
    """Return what ``read`` reads from a path; its DataError becomes a ConfigurationError PT602."""
    try:
        return read(path)
    except DataError as error:
        raise ConfigurationError("PT602", str(error), error.help) from error


def _open_documents(path: Path, count: int) -> I64:
    size = path.stat().st_size if path.is_file() else 0
    documents = map_array(path, np.dtype("<i8"), 0, size // 8, exact=True)
    check_offsets(documents, count, path)
    return documents


def check_offsets(documents: I64, count: int, path: Path) -> None:
    """Raise ConfigurationError PT602 unless the offsets in ``documents`` increase from 0 to ``count``."""
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != count:
        raise ConfigurationError("PT602", f"{path}: document offsets must go from 0 to the number of tokens, {count}")
    for start in range(0, len(documents) - 1, 1 << 20):
        if (np.diff(documents[start : start + (1 << 20) + 1]) < 0).any():
            raise ConfigurationError("PT602", f"{path}: document offsets fall")


def map_array(path: Path, dtype: np.dtype[Any], offset: int, count: int, *, exact: bool = False) -> npt.NDArray[Any]:
    """Memory-map ``count`` values from byte ``offset`` on.

    Raises ConfigurationError PT602 if the file is shorter or, with ``exact``, longer.
    """
    try:
        check_size(path, count, dtype.itemsize, dtype.name, offset, exact=exact)
    except DataError as error:
        raise ConfigurationError("PT602", str(error)) from error
    if count == 0:
        return np.empty(0, dtype=dtype)
    try:
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
    except OSError as error:
        raise ConfigurationError("PT601", f"{path} cannot be read: {error.strerror}") from error


def checksum(path: Path) -> int:
    """Return a CRC-32 of a file's size and content; of files above 256 MiB only 256 evenly spaced MiB are read."""
    size = path.stat().st_size
    blocks = -(-size // _BLOCK_BYTES)
    taken = min(blocks, _MAX_BLOCKS)
    crc = zlib.crc32(str(size).encode())
    with path.open("rb") as file:
        for block in range(taken):
            file.seek(block * (blocks - 1) // max(taken - 1, 1) * _BLOCK_BYTES)
            crc = zlib.crc32(file.read(_BLOCK_BYTES), crc)
    return crc
