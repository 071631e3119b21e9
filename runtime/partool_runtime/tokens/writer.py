"""Writes the files of a token cache: tokens, the borders of documents, and which tokens are trained on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from partool_runtime.tokens.sources import TokenPart

_NUMBERS_BUFFERED = 1 << 16


class Writer:
    """Appends the parts of documents to the files of a folder, and describes them; a context manager.

    The files of the loss are written from the first part that says which of its tokens are trained on.
    """

    def __init__(self, folder: Path, vocab: int) -> None:
        self._folder = folder
        self._vocab = vocab
        self._dtype: np.dtype[Any] = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
        self._files: dict[str, BinaryIO] = {}
        self._documents = _Numbers(self._file("tokens.documents.bin"))
        self._documents.add(0)
        self._tokens = self._file("tokens.bin")
        self._trained: _Numbers | None = None
        self._loss: BinaryIO | None = None
        self._document = _Document()
        self.count = 0
        """Number of tokens."""
        self._empty, self._masked = _Counted(), _Counted()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files; without an error, sync them to the disk before."""
        self._documents.flush()
        if self._trained is not None:
            self._trained.flush()
        for file in self._files.values():
            file.flush()
            if error[0] is None:
                os.fsync(file.fileno())
            file.close()

    def add(self, part: TokenPart) -> None:
        """Append a part of a document; a document without tokens is counted but not written."""
        self._tokens.write(part.tokens.astype(self._dtype).data)
        if part.loss is not None:
            self._mark(part.loss)
        self._document.size += len(part.tokens)
        self.count += len(part.tokens)
        if part.ends_document:
            self._end(part.origin)

    def _mark(self, loss: np.typing.NDArray[np.uint8]) -> None:
        if self._loss is None:
            self._loss = self._file("tokens.loss.bin")
            self._trained = _Numbers(self._file("tokens.trained.bin"))
        self._loss.write(loss.astype(np.uint8).data)
        # A document's first token is predicted by none.
        places = np.flatnonzero(loss) + self._document.size
        places = places[places > 0]
        if len(places):
            self._document.first = self._document.first if self._document.first > 0 else int(places[0])
            self._document.last = int(places[-1])

    def _end(self, origin: str) -> None:
        document, self._document = self._document, _Document()
        if not document.size:
            self._empty.add(origin)
            return
        self._documents.add(self.count)
        if self._trained is not None:
            self._trained.add(document.first, document.last)
            if document.first < 0:
                self._masked.add(origin)

    def _file(self, name: str) -> BinaryIO:
        self._files[name] = (self._folder / name).open("wb")
        return self._files[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files."""
        return tuple(sorted(self._files))

    @property
    def description(self) -> dict[str, Any]:
        """The sidecar's fields (:class:`partool.plan.token_files.Sidecar`)."""
        fields: dict[str, Any] = {
            "dtype": self._dtype.name,
            "count": self.count,
            "vocab": self._vocab,
            "documents": "tokens.documents.bin",
        }
        if self._loss is not None:
            fields |= {"loss": "tokens.loss.bin", "trained": "tokens.trained.bin"}
        if self._empty.count:
            fields |= {"left_out": self._empty.count, "first_left_out": self._empty.first}
        if self._masked.count:
            fields |= {"masked": self._masked.count, "first_masked": self._masked.first}
        return fields


class _Document:
    """The document of which parts are being added."""

    def __init__(self) -> None:
        self.size = 0
        self.first = self.last = -1


class _Counted:
    """A number of documents, and the origin of the first."""

    def __init__(self) -> None:
        self.count, self.first = 0, ""

    def add(self, origin: str) -> None:
        self.first = self.first or origin
        self.count += 1


class _Numbers:
    """Numbers, written as little-endian int64."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._buffered: list[int] = []

    def add(self, *numbers: int) -> None:
        self._buffered += numbers
        if len(self._buffered) >= _NUMBERS_BUFFERED:
            self.flush()

    def flush(self) -> None:
        self._file.write(np.array(self._buffered, dtype="<i8").data)
        self._buffered.clear()
