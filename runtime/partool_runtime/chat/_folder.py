"""Read a tokenizer's folder as a rank does: what cannot be read ends the run with a code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from partool.plan import tokenizer_folder
from partool.plan.records import DataError
from partool_runtime.errors import ConfigurationError

Content = TypeVar("Content")


def read_text(path: Path) -> str | None:
    """Return a file's text, None if there is no such file; raises ConfigurationError PT603."""
    return _readable(tokenizer_folder.read_text, path)


def templates_of(folder: Path) -> dict[str, str]:
    """See :func:`partool.plan.tokenizer_folder.templates_of`; raises ConfigurationError PT603."""
    return _readable(tokenizer_folder.templates_of, folder)


def special_tokens_of(folder: Path) -> dict[str, str]:
    """See :func:`partool.plan.tokenizer_folder.special_tokens_of`; raises ConfigurationError PT603."""
    return _readable(tokenizer_folder.special_tokens_of, folder)


def _readable(read: Callable[[Path], Content], path: Path) -> Content:
    try:
        return read(path)
    except DataError as error:
        raise ConfigurationError("PT603", str(error), error.help) from error
