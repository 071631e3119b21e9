"""Documents of text and JSONL files, as a stream of pieces of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from partool_runtime.data._files import SourceFile
from partool_runtime.errors import ConfigurationError

PIECE_BYTES = 1 << 17
"""Longer text files are read and tokenised in pieces of about this size that end at a line break."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of one document."""

    data: bytes
    ends_document: bool
    origin: str
    """File, or file and line, for messages."""


def pieces(files: Iterable[SourceFile], text_field: str) -> Iterator[Piece]:
    """Yield every document of text files (a file each) and JSONL files (a record each).

    A record without text is a piece of no bytes. Empty files, such as a package's ``__init__.py``, are no documents.
    Raises ConfigurationError PT601 if a file cannot be read, PT602 for a malformed record.
    """
    for file in files:
        try:
            if file.format == "jsonl":
                yield from _jsonl(file.path, text_field)
            else:
                yield from _text(file.path)
        except OSError as error:
            raise ConfigurationError("PT601", f"{file.path} cannot be read: {error.strerror}") from error


def _text(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        data = file.read(PIECE_BYTES)
        while data:
            following = file.read(PIECE_BYTES)
            cut = _cut(data) if following else len(data)
            yield Piece(data[:cut], not following, str(path))
            data = data[cut:] + following


def _cut(data: bytes) -> int:
    """Return where a piece may end: after the last line break, or else not inside a UTF-8 sequence."""
    line_break = data.rfind(b"\n") + 1
    if line_break:
        return line_break
    for back in range(1, 4):
        if data[-back] >= 0xC0:
            return len(data) - back
        if data[-back] < 0x80:
            break
    return len(data)


def _jsonl(path: Path, text_field: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            text = _text_of(line, text_field, origin)
            # Lone surrogates are legal in JSON; the bytes tokenizer takes them as they are.
            yield Piece(text.encode("utf-8", errors="surrogatepass"), True, origin)


def _text_of(line: bytes, text_field: str, origin: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError("PT602", f"{origin} is not valid JSON: {error}", "one JSON object per line") from error
    if not isinstance(record, dict):
        raise ConfigurationError("PT602", f"{origin} holds a {type(record).__name__}, not a JSON object")
    if text_field not in record:
        keys = ", ".join(sorted(record)) or "none"
        raise ConfigurationError(
            "PT602", f"{origin} has no key {text_field!r} (its keys: {keys})", "set data.text_field to the text's key"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise ConfigurationError("PT602", f"{origin}: {text_field!r} is a {type(text).__name__}, not a string")
    return text
