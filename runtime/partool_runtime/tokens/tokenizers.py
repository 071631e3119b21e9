"""Tokenizers: raw bytes, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from partool.plan.records import NOT_UTF8
from partool_runtime.errors import ConfigurationError
from partool_runtime.fast_tokenizer import open_fast, vocab_of
from partool_runtime.tokens.documents import DocumentPiece

Tokens = npt.NDArray[Any]

_BATCH_BYTES = 1 << 20
_EOS_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer(Protocol):
    """Converts pieces of documents into token ids."""

    identity: str
    """Text that is part of the cache's key; two tokenizers that give the same tokens have equal texts."""
    vocab: int
    """Exclusive upper bound of the tokens."""
    separator: int | None
    """Token that ends every document."""

    def encode(self, pieces: Iterable[DocumentPiece]) -> Iterator[tuple[Tokens, DocumentPiece]]:
        """Yield each piece's tokens, and the piece, in order."""


class BytesTokenizer:
    """Uses each byte as a token. Byte 0 ends a document, as text does not contain byte 0, so 256 tokens suffice."""

    identity = "bytes-0"
    vocab = 256
    separator: int | None = 0

    def encode(self, pieces: Iterable[DocumentPiece]) -> Iterator[tuple[Tokens, DocumentPiece]]:
        """Yield every piece's bytes."""
        for piece in pieces:
            yield np.frombuffer(piece.data, dtype=np.uint8), piece


class FolderTokenizer:
    """A tokenizer in a Hugging Face folder, read with the ``tokenizers`` library.

    The only special token that is added is the end-of-sequence token after each document, if the folder defines one.
    Raises ConfigurationError PT603 if the folder cannot be used.
    """

    def __init__(self, folder: Path, special_tokens: Sequence[str] = ()) -> None:
        self._fast, content = open_fast(folder, special_tokens)
        self.vocab = vocab_of(self._fast)
        self.separator: int | None = self._eos(folder)
        self.identity = hashlib.sha256(f"{self.separator}\n{content}".encode()).hexdigest()

    def _eos(self, folder: Path) -> int | None:
        for name in _EOS_FILES:
            token = _read_json(folder / name).get("eos_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                token_id = self._fast.token_to_id(text)
                if token_id is None:
                    raise ConfigurationError(
                        "PT603", f"{folder / name} names eos_token {text!r}, which tokenizer.json does not know"
                    )
                return int(token_id)
        return None

    def encode(self, pieces: Iterable[DocumentPiece]) -> Iterator[tuple[Tokens, DocumentPiece]]:
        """Yield every piece's tokens; the library encodes many pieces at a time, on several threads."""
        batch: list[DocumentPiece] = []
        size = 0
        for piece in pieces:
            batch.append(piece)
            size += len(piece.data)
            if size >= _BATCH_BYTES:
                yield from self._encode_batch(batch)
                batch, size = [], 0
        yield from self._encode_batch(batch)

    def _encode_batch(self, batch: list[DocumentPiece]) -> Iterator[tuple[Tokens, DocumentPiece]]:
        texts = [_decode(piece) for piece in batch]
        encodings = self._fast.encode_batch_fast(texts, add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            yield np.asarray(encoding.ids, dtype=np.uint32), piece


def open_tokenizer(name: str, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Return the tokenizer ``name`` (``data.tokenizer``); raises ConfigurationError PT603 if it cannot be used."""
    return BytesTokenizer() if name == "bytes" else FolderTokenizer(Path(name), special_tokens)


def _decode(piece: DocumentPiece) -> str:
    try:
        return piece.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            "PT602",
            f"{piece.origin} is not UTF-8: {error.reason} (byte {error.object[error.start]:#04x})",
            NOT_UTF8,
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, or an empty object if the file is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError("PT603", f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
