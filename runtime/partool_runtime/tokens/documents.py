"""Reading of documents from text files and from records as a stream of pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from partool.plan.data_files import SourceFile
from partool.plan.record_files import records_in
from partool.plan.records import DataError, text_of
from partool_runtime.errors import ConfigurationError

PIECE_BYTES = 1 << 17
"""Text files with more bytes are read and tokenised in pieces of about this size, which end at a line break."""


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """Consecutive bytes of one document."""

    data: bytes
    ends_document: bool
    origin: str
    """File, or file and line, of the document; used in messages."""


def pieces(files: Iterable[SourceFile], text_field: str) -> Iterator[DocumentPiece]:
    """Yield the pieces of every document; a document is a text file or a record.

    A record without text gives a piece of 0 bytes. Empty files, such as a package's ``__init__.py``, are skipped.
    Raises ConfigurationError PT601 if a file cannot be read, PT602 for a malformed record.
    """
    for file in files:
        try:
            yield from _text(file.path) if file.format == "text" else _records(file, text_field)
        except OSError as error:
            raise ConfigurationError("PT601", f"{file.path} cannot be read: {error.strerror}") from error
        except DataError as error:
            raise ConfigurationError("PT602", str(error), error.help) from error


def _text(path: Path) -> Iterator[DocumentPiece]:
    with path.open("rb") as file:
        data = file.read(PIECE_BYTES)
        while data:
            following = file.read(PIECE_BYTES)
            cut = _cut(data) if following else len(data)
            yield DocumentPiece(data[:cut], not following, str(path))
            data = data[cut:] + following


def _cut(data: bytes) -> int:
    """Return the index after the last line break in ``data``; if there is none, after the last whole UTF-8 sequence."""
    line_break = data.rfind(b"\n") + 1
    if line_break:
        return line_break
    for back in range(1, 4):
        if data[-back] >= 0xC0:
            return len(data) - back
        if data[-back] < 0x80:
            break
    return len(data)


def _records(file: SourceFile, text_field: str) -> Iterator[DocumentPiece]:
    column = None if file.format == "jsonl" else text_field
    for record, origin in records_in(file.path, file.format, column):
        # Lone surrogates are legal in JSON; the bytes tokenizer accepts them.
        text = text_of(record, text_field, origin).encode("utf-8", errors="surrogatepass")
        yield DocumentPiece(text, True, origin)
