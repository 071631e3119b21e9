"""What a Hugging Face folder says about its tokenizer: chat templates and named special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partool_runtime.errors import ConfigurationError

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: the second is used for conversations with tools, where a folder has it."""

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def read_text(path: Path) -> str | None:
    """Return a file's text, None if there is no such file; raises ConfigurationError PT603."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError("PT603", f"{path} cannot be read: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, an empty one if there is no such file; raises ConfigurationError PT603."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigurationError("PT603", f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def templates_of(folder: Path) -> dict[str, str]:
    """Return a folder's chat templates by name; an empty dictionary if it has none.

    transformers' order: ``chat_template.jinja`` with ``additional_chat_templates``, then ``chat_template.json``, then
    ``tokenizer_config.json``, where ``chat_template`` is a template or a list of named ones.
    """
    main = read_text(folder / "chat_template.jinja")
    named = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
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
    names further tokens of this model.
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
