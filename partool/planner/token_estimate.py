"""Estimates the tokens of data that nobody has tokenised, from the beginning of some files.

Planning has no tokenizer library. A text's tokens are estimated by taking, again and again, the longest entry of the
tokenizer's vocabulary that the rest of the text begins with, word by word; byte pair encoding merges in another order
and mostly arrives at the same pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path

from partool.plan.conversations import Completion, Conversation, Preference, Sample, parse, recognise
from partool.plan.data_files import PYTHON_STDLIB, is_companion
from partool.plan.records import DataError, format_of, record_of, stdlib_files, text_of
from partool.planner.rules.data_sample import files_of
from partool.spec.data import DataSpec

_FILES = 8
"""Files whose beginnings are read."""
_MOST_FILES = 10_000
"""Files whose sizes are added; there is no estimate of more."""
_BYTES = 1 << 16
"""Bytes that are read of each file."""
_AROUND_A_MESSAGE = 4
"""Tokens that a chat template writes around a message: two marks, the role, a line end."""
_LONGEST = 24
"""Characters of the longest entries of the vocabulary that are looked for."""
_WORD = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\s\w]+|\s+(?!\S)|\s+|_+")
"""Words as the pre-tokenizers of byte-level tokenizers cut them, with the space before them."""


def estimate_tokens(data: DataSpec) -> int | None:
    """Return about how many tokens a section's only source has; its paths are absolute.

    None where nothing can be said: no file on this machine, compressed columns, or a tokenizer without a vocabulary.
    """
    try:
        words = _vocabulary(Path(data.tokenizer) / "tokenizer.json") if data.tokenizer != "bytes" else None
        size_bytes = read_bytes = tokens = 0
        for number, path in enumerate(_files(data)):
            size_bytes += path.stat().st_size
            if number < _FILES and words is not None:
                each_bytes, each_tokens = _beginning(path, data, words)
                read_bytes, tokens = read_bytes + each_bytes, tokens + each_tokens
            if number == _MOST_FILES:
                return None
    except (OSError, DataError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return round(size_bytes * tokens / read_bytes) if read_bytes else None


def _files(data: DataSpec) -> Iterator[Path]:
    for source in [data.source] if isinstance(data.source, str) else data.source:
        paths = stdlib_files() if source == PYTHON_STDLIB else files_of(source)
        yield from (path for path in paths if path.is_file() and not is_companion(path, data.format))


def _beginning(path: Path, data: DataSpec, words: frozenset[str]) -> tuple[int, int]:
    """Return the bytes that were read of a file, and about how many tokens they have.

    Raises DataError for files that are no text.
    """
    kind = format_of(path, data.format)
    if kind not in ("text", "jsonl"):
        raise DataError(f"{path} is read by other libraries")
    with path.open("rb") as file:
        start = file.read(_BYTES)
    if kind == "text":
        return len(start), _tokens(start.decode("utf-8", errors="ignore"), words)
    lines = start.split(b"\n") if len(start) < _BYTES else start.split(b"\n")[:-1]
    read = [line for line in lines if line.strip()]
    return sum(len(line) + 1 for line in read), sum(_of_record(line, str(path), data, words) for line in read)


def _of_record(line: bytes, origin: str, data: DataSpec, words: frozenset[str]) -> int:
    record = record_of(line, origin)
    kind = recognise(record, data, origin) if data.records == "auto" else data.records
    if kind == "text":
        return _tokens(text_of(record, data.text_field, origin), words) + 1
    sample = parse(record, kind, data, origin)
    if isinstance(sample, Preference):
        return _of_sample(sample.chosen, words) + _of_sample(sample.rejected, words)
    return _of_sample(sample, words)


def _of_sample(sample: Sample, words: frozenset[str]) -> int:
    if isinstance(sample, Completion):
        return _tokens(sample.prompt, words) + _tokens(sample.completion, words) + 1
    assert isinstance(sample, Conversation)
    texts = [message.get("content") for message in sample.messages]
    parts = [part if isinstance(part, str) else json.dumps(part) for part in texts if part]
    return sum(_tokens(part, words) for part in parts) + _AROUND_A_MESSAGE * len(texts)


def _vocabulary(file: Path) -> frozenset[str]:
    """Return the entries of a tokenizer as plain text; raises OSError, or what wrong content leads to."""
    return _entries(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _entries(file: Path, written_ns: int) -> frozenset[str]:
    words = json.loads(file.read_bytes())["model"]["vocab"]
    entries = list(words) if isinstance(words, dict) else [word[0] for word in words]
    if any(entry.startswith("Ġ") for entry in islice(entries, 4096)):
        table = str.maketrans({character: chr(byte) for byte, character in _byte_characters().items()})
        return frozenset(
            entry.translate(table).encode("latin-1", "ignore").decode("utf-8", "ignore") for entry in entries
        )
    return frozenset(entry.replace("▁", " ").removeprefix("##") for entry in entries)


def _byte_characters() -> dict[int, str]:
    """Return the characters that byte-level vocabularies write bytes as (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _tokens(text: str, words: frozenset[str]) -> int:
    return sum(_pieces(word, words) for word in _WORD.findall(text))


def _pieces(word: str, words: frozenset[str]) -> int:
    """Return the number of entries that a word is cut into; other characters count as many as they have bytes."""
    if word in words:
        return 1
    count = at = 0
    while at < len(word):
        sizes = range(min(_LONGEST, len(word) - at), 0, -1)
        size = next((size for size in sizes if word[at : at + size] in words), 0)
        count += 1 if size else len(word[at].encode())
        at += size or 1
    return count
