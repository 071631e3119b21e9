"""Detect the formats of data files and read their records; planning, sampling and the run report equal errors."""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

Record = Mapping[str, Any]
"""A record of a file by its keys: a line of JSONL, a row of a table."""
Format = Literal["text", "jsonl", "parquet", "arrow", "tokens", "megatron"]
_BY_ENDING: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_PACKED_AWAY = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"}
NOT_UTF8 = "convert it to UTF-8, or use data.tokenizer: bytes"


class DataError(ValueError):
    """A file or a record that cannot be read as data; ``help`` says how to fix it, where that is known."""

    def __init__(self, message: str, help: str = "") -> None:
        super().__init__(message)
        self.help = help


_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@cache
def stdlib_files() -> tuple[Path, ...]:
    """Return the files of the source ``python-stdlib`` without an order: the interpreter's library without its tests.

    They are looked for once in a process: nothing changes the library of an interpreter that runs.
    """
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _STDLIB_LEFT_OUT]
        paths = (Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("."))
        files += [path for path in paths if path.is_file()]
    return tuple(files)


_SIDECAR = 'write a sidecar such as {"dtype": "uint16", "count": 1000000, "vocab": 50257}'


def format_of(path: Path, wanted: Format | Literal["auto"]) -> Format:
    """Return a file's format: ``wanted``, or with ``auto`` the suffix's format; DataError for unsupported files."""
    if wanted in ("tokens", "megatron"):
        beside = path.with_suffix(".json" if wanted == "tokens" else ".idx")
        if not beside.is_file():
            help = _SIDECAR if wanted == "tokens" else "Megatron's data are pairs of a .bin and its .idx"
            raise DataError(f"{path} has no {beside.name} beside it, which data.format: {wanted} needs", help)
    if wanted != "auto":
        return wanted
    ending = path.suffix.lower()
    if ending in _BY_ENDING:
        return _BY_ENDING[ending]
    if ending == ".bin":
        if path.with_suffix(".idx").is_file():
            return "megatron"
        if path.with_suffix(".json").is_file():
            return "tokens"
        raise DataError(
            f"{path} has neither a sidecar {path.stem}.json nor a Megatron index {path.stem}.idx beside it",
            _SIDECAR,
        )
    if ending in _PACKED_AWAY:
        help = "unpack it to text or JSONL, or set data.format: text to read its bytes as they are"
        raise DataError(f"{path}: {ending} files are not read", help)
    return "text"


def record_of(line: bytes, origin: str) -> Record:
    """Return the record of a line of JSONL; ``origin`` is its file and line, for the DataError of a malformed one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} is not valid JSON: {error}", "one JSON object per line") from error
    if not isinstance(record, dict):
        raise DataError(f"{origin} holds a {type(record).__name__}, not a JSON object")
    return record


def text_of(record: Record, text_field: str, origin: str) -> str:
    """Return the text of a record; raises DataError where it has none."""
    if text_field not in record:
        keys = ", ".join(sorted(record)) or "none"
        raise DataError(
            f"{origin} has no key {text_field!r} (its keys: {keys})", "set data.text_field to the text's key"
        )
    value = record[text_field]
    if not isinstance(value, str):
        raise DataError(f"{origin}: {text_field!r} is a {type(value).__name__}, not a string")
    return value


def check_text(start: bytes, path: Path) -> None:
    """Raise DataError if the first bytes of a file, whose last character may be cut, are not UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8: {error.reason} (byte {error.object[error.start]:#04x})"
        raise DataError(message, NOT_UTF8) from error
