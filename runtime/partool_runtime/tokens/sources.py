"""What a token cache is made from: texts, or conversations, as parts of documents in tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from partool.plan.data_files import SourceFile
from partool_runtime.tokens.documents import pieces
from partool_runtime.tokens.tokenizers import Tokenizer

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Consecutive tokens of one document."""

    tokens: Tokens
    ends_document: bool
    loss: npt.NDArray[np.uint8] | None = None
    """1 for each token that is trained on; None if all are."""
    origin: str = ""
    """File, or file and line, of the document; used in messages."""


class TokenSource(Protocol):
    """Files that give tokens."""

    files: Sequence[SourceFile]
    identity: str
    """Text that is equal for tokenizers that give the same tokens."""
    vocab: int
    """Exclusive upper bound of the tokens."""

    def notes(self) -> tuple[str, ...]:
        """Return what is doubtful about the source, in sentences."""

    def parts(self) -> Iterator[TokenPart]:
        """Yield the parts of every document, in order; a document without tokens has one part without tokens."""


class TextSource:
    """Texts, each of which ends with the tokenizer's separator."""

    def __init__(self, files: Sequence[SourceFile], tokenizer: Tokenizer, text_field: str) -> None:
        self.files = files
        self.identity = tokenizer.identity
        self.vocab = tokenizer.vocab
        self._tokenizer = tokenizer
        self._text_field = text_field

    def notes(self) -> tuple[str, ...]:
        """See :class:`TokenSource`."""
        return ()

    def parts(self) -> Iterator[TokenPart]:
        """See :class:`TokenSource`."""
        end = [] if self._tokenizer.separator is None else [self._tokenizer.separator]
        empty = True
        for tokens, piece in self._tokenizer.encode(pieces(self.files, self._text_field)):
            empty = empty and not len(tokens)
            closing = end if piece.ends_document and not empty else []
            joined = np.concatenate([tokens, np.array(closing, dtype=np.int64)]) if closing else tokens
            yield TokenPart(joined, piece.ends_document, origin=piece.origin)
            empty = empty or piece.ends_document
