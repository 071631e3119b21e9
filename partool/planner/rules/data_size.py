"""Counts the tokens of a spec's data while planning, where the files say it without being read as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from partool.plan.data_files import PYTHON_STDLIB, is_companion
from partool.plan.records import DataError, format_of, stdlib_files
from partool.plan.token_files import read_index, read_sidecar
from partool.planner.rules.data_sample import files_of
from partool.spec.data import DataSpec

MOST_FILES = 10_000
"""Maximum number of files whose sizes are read, so that planning stays fast on large folders."""


class UncountedError(ValueError):
    """Raised where tokens cannot be counted; the message says why, and what would tell."""


def count_tokens(data: DataSpec) -> int:
    """Return the number of tokens in the sources of a ``data`` section with absolute paths.

    Token files and Megatron's files have their number beside them or in their size; text has one token per byte with
    the tokenizer ``bytes``, and one more that ends each file. Raises UncountedError for everything else, and for files
    that are not on this machine.
    """
    sources = [data.source] if isinstance(data.source, str) else data.source
    total = 0
    seen: set[Path] = set()
    for source in sources:
        here = False
        for path in _readable(source):
            here = True
            if path in seen or is_companion(path, data.format):
                continue
            seen.add(path)
            if len(seen) > MOST_FILES:
                raise UncountedError(f"there are more than {MOST_FILES:,} files")
            total += _tokens(path, data)
        if not here:
            raise UncountedError("the files are not on this machine; plan where they are")
    return total


def _readable(source: str) -> Iterator[Path]:
    """Yield the files of a source; raises UncountedError where the system refuses to list them."""
    try:
        yield from _files(source)
    except OSError as error:
        raise UncountedError(f"{source} cannot be read: {error.strerror}") from error


def _files(source: str) -> Iterator[Path]:
    if source == PYTHON_STDLIB:
        return iter(stdlib_files())
    return (path for path in islice(files_of(source), 2 * MOST_FILES + 2) if path.is_file())


def _tokens(path: Path, data: DataSpec) -> int:
    try:
        kind = format_of(path, data.format)
        if kind == "tokens":
            return read_sidecar(path).count
        if kind == "megatron":
            return path.stat().st_size // read_index(path.with_suffix(".idx")).token_bytes
        if kind == "text" and data.tokenizer == "bytes":
            size_bytes = path.stat().st_size
            return size_bytes + (size_bytes > 0)
    except (OSError, DataError) as error:
        raise UncountedError(f"{path.name} cannot be read as data") from error
    raise UncountedError("the text is not tokenised yet; token files (.bin with .json) say their number")
