"""Opens the tokenizer of a Hugging Face folder with the library ``tokenizers``, which is imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partool_runtime.errors import ConfigurationError


def open_fast(folder: Path, special_tokens: Sequence[str] = ()) -> tuple[Any, str]:
    """Return the library's tokenizer of a Hugging Face folder, and its content as JSON.

    It neither cuts nor pads. Those of ``special_tokens`` that it lacks are added to it, and to the content, and get the
    next ids. Raises ConfigurationError PT603 if the folder cannot be used.
    """
    try:
        from tokenizers import Tokenizer as Fast
    except ImportError as error:
        message = f"data.tokenizer: {folder} needs the package tokenizers, which is not installed"
        raise ConfigurationError("PT603", message, 'pip install "partool[hf]"') from error
    content = _read_tokenizer_json(folder)
    try:
        fast = Fast.from_str(content)
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError("PT603", f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    if special_tokens:
        fast.add_special_tokens(list(special_tokens))
        content = fast.to_str(pretty=True)
    return fast, content


def vocab_of(fast: Any) -> int:
    """Return the exclusive upper bound of the ids of the library's tokenizer."""
    return max(fast.get_vocab(with_added_tokens=True).values(), default=0) + 1


def _read_tokenizer_json(folder: Path) -> str:
    if not folder.is_dir():
        help = "data.tokenizer is `bytes` or the path of a folder with a tokenizer.json"
        raise ConfigurationError("PT603", f"data.tokenizer: there is no folder {folder}", help)
    path = folder / "tokenizer.json"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        help = "save the tokenizer with transformers' save_pretrained, which writes tokenizer.json"
        raise ConfigurationError("PT603", f"{folder} has no tokenizer.json", help) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError("PT603", f"{path} cannot be read: {error}") from error
