"""What a Hugging Face folder says about its tokenizer: its files, chat templates and named special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partool.plan.records import DataError

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: the second is used for conversations with tools, where a folder has it."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Names of a tokenizer's files; further templates are in the folder :data:`FURTHER_TEMPLATES`."""
FURTHER_TEMPLATES = "additional_chat_templates"

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """Yield the paths of the tokenizer's files that a folder has, relative to it."""
    yield from (Path(name) for name in TOKENIZER_FILES if (folder / name).is_file())
    yield from (path.relative_to(folder) for path in sorted((folder / FURTHER_TEMPLATES).glob("*.jinja")))


def read_text(path: Path) -> str | None:
    """Return a file's text, None if there is no such file; raises DataError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, an empty one if there is no such file; raises DataError for other content."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def templates_of(folder: Path) -> dict[str, str]:
    """Return a folder's chat templates by name; an empty dictionary if it has none. Raises DataError.

    transformers' order: ``chat_template.jinja`` with ``additional_chat_templates``, then ``chat_template.json``, then
    ``tokenizer_config.json``, where ``chat_template`` is a template or a list of named ones.
    """
    main = read_text(folder / "chat_template.jinja")
    further = sorted((folder / FURTHER_TEMPLATES).glob("*.jinja"))
    named = {path.stem: read_text(path) or "" for path in further}
    if main is not None:
        return {**named, DEFAULT: main}
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_object(folder / name).get("chat_template")
        if isinstance(value, str):
            return {**named, DEFAULT: value}
        if isinstance(value, list):
            entries = [entry for entry in value if isinstance(entry, dict)]
            return {**named, **{str(entry.get("name")): str(entry.get("template", "")) for entry in entries}}
        if isinstance(value, dict):
            return {**named, **{str(key): str(template) for key, template in value.items()}}
    return named


def special_tokens_of(folder: Path) -> dict[str, str]:
    """Return the named special tokens (``bos_token``, ``eos_token``, ...), which templates read as variables.

    ``tokenizer_config.json`` comes before ``special_tokens_map.json``. A dictionary under ``extra_special_tokens``
    names further tokens of this model. Raises DataError.
    """
    tokens: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        content = read_object(folder / name)
        extra = content.get("extra_special_tokens")
        named = {key: content.get(key) for key in _NAMED} | (extra if isinstance(extra, dict) else {})
        for key, value in named.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens.setdefault(key, text)
    return tokens


def vocab_of(folder: Path, special_tokens: list[str]) -> int:
    """Return the exclusive upper bound of a tokenizer's ids, once it has ``special_tokens``.

    Raises OSError if ``tokenizer.json`` cannot be read, DataError if it holds no tokenizer.
    """
    file = folder / "tokenizer.json"
    try:
        content = json.loads(file.read_bytes())
        added = {str(token["content"]): int(token["id"]) for token in content.get("added_tokens", [])}
        words = content["model"]["vocab"]
        ids = words.values() if isinstance(words, dict) else range(len(words))
        texts = set(words) if isinstance(words, dict) else {str(word[0]) for word in words}
        new = set(special_tokens) - texts - set(added)
        return int(max([*ids, *added.values()])) + 1 + len(new)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DataError(f"{file} is no tokenizer file") from error
