"""Reading of documents from text, JSONL and Parquet files as a stream of pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from partool.plan.records import DataError, parquet_texts, text_of
from partool_runtime.data._files import SourceFile
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
    """Yield the pieces of every document; a document is a text file, a JSONL record or a Parquet row.

    A record without text gives a piece of 0 bytes. Empty files, such as a package's ``__init__.py``, are skipped.
    Raises ConfigurationError PT601 if a file cannot be read, PT602 for a malformed record.
    """
    for file in files:
        try:
            if file.format == "jsonl":
                yield from _jsonl(file.path, text_field)
            elif file.format == "parquet":
                yield from _parquet(file.path, text_field)
            else:
                yield from _text(file.path)
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


def _jsonl(path: Path, text_field: str) -> Iterator[DocumentPiece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            text = text_of(line, text_field, origin)
            # Lone surrogates are legal in JSON; the bytes tokenizer accepts them.
            yield DocumentPiece(text.encode("utf-8", errors="surrogatepass"), True, origin)


def _parquet(path: Path, text_field: str) -> Iterator[DocumentPiece]:
    for text, origin in parquet_texts(path, text_field):
        yield DocumentPiece(text.encode("utf-8", errors="surrogatepass"), True, origin)
