"""Tokens of the texts of tasks, as lm-evaluation-harness makes them for models of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from partool_runtime.errors import ConfigurationError


class TaskTokenizer(Protocol):
    """Turns texts into tokens."""

    def encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        """Return the tokens of a text; None leaves special tokens to the tokenizer's settings."""

    @property
    def prefix(self) -> int:
        """Token that stands before a text without a context."""


class ByteTokens:
    """Each byte is a token; byte 0, which ends documents, stands before a text."""

    prefix = 0

    def encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        """See :class:`TaskTokenizer`."""
        return list(text.encode())


class FolderTokens:
    """A tokenizer of transformers, as ``lm_eval.models.huggingface.HFLM`` uses it.

    Raises ConfigurationError PT603 for a folder without one, PT642 for one without a token to begin with.
    """

    def __init__(self, folder: str, special_tokens: Sequence[str]) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            message = f"data.tokenizer: {folder} needs the package transformers, which is not installed"
            raise ConfigurationError("PT603", message, "pip install 'partool[eval]'") from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            help = "data.tokenizer is `bytes` or a folder that transformers' AutoTokenizer reads"
            raise ConfigurationError("PT603", f"data.tokenizer: {folder} cannot be read: {error}", help) from error
        if special_tokens:
            self._tokenizer.add_tokens(list(special_tokens), special_tokens=True)
        first = self._tokenizer.bos_token_id
        self._prefix: int | None = self._tokenizer.eos_token_id if first is None else first
        self._prefix_text = None if self._prefix is None else str(self._tokenizer.decode(self._prefix))

    def encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        """See :class:`TaskTokenizer`. A text that begins with the prefix does not get a second one."""
        if add_special_tokens is None and self._prefix_text and text.startswith(self._prefix_text):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self._tokenizer.encode(text, **special))

    @property
    def prefix(self) -> int:
        """See :class:`TaskTokenizer`."""
        if self._prefix is None:
            message = "the tokenizer has neither bos_token nor eos_token, one of which stands before a text"
            raise ConfigurationError("PT642", message, "name one in the folder's tokenizer_config.json")
        return self._prefix


def open_tokens(name: str, special_tokens: Sequence[str]) -> TaskTokenizer:
    """Return the tokenizer ``name`` (``data.tokenizer``); raises what :class:`FolderTokens` raises."""
    return ByteTokens() if name == "bytes" else FolderTokens(name, special_tokens)
