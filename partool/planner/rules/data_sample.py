"""Check of the first lines of a few data files while planning, so that errors are reported before ranks start."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from partool.plan.conversations import parse, recognise
from partool.plan.data_files import NoFilesError, is_companion
from partool.plan.record_files import records_in
from partool.plan.records import DataError, Format, Record, check_text, format_of, record_of, text_of
from partool.plan.token_files import check_megatron, check_tokens
from partool.spec.data import DataSpec, RecordKind

_FILES = 3
"""Number of files that are opened per source."""
_LINES = 5
_MOST_BYTES = 1 << 16
"""Number of bytes read from each file; the first record of a file is not checked if the record is longer."""
_NAMES = 1000
"""Maximum number of directory entries searched for files, so that planning stays fast on large folders."""


def sample(source: str, data: DataSpec) -> RecordKind | None:
    """Read the first records of a few files of a source that exists on this machine.

    Returns what the first record holds, None if no file holds records. Raises NoFilesError for a folder or a pattern
    without files, DataError for records that the ranks would reject, OSError for files that cannot be read. Hidden
    files and linked folders are skipped, as the runtime does.
    """
    if data.format == "auto" and source.endswith(".json") and not os.path.isdir(source):
        help = "write one JSON object per line (.jsonl); data.format: text would train on the file's characters"
        raise DataError(f"{source}: a JSON document is not a list of records", help)
    read_files = read_bytes = 0
    kind: RecordKind | None = None
    for path in islice(files_of(source), _NAMES):
        if is_companion(path, data.format):
            continue
        kind = _read(path, data if kind is None else data.model_copy(update={"records": kind})) or kind
        read_files, read_bytes = read_files + 1, read_bytes + path.stat().st_size
        if read_files == _FILES:
            return kind
    if not read_files:
        raise NoFilesError(f"there are no files to read in {source}")
    if not read_bytes:
        raise NoFilesError(f"{source} is empty" if os.path.isfile(source) else f"all files in {source} are empty")
    return kind


def files_of(source: str) -> Iterator[Path]:
    """Yield the files of a source (a file, a folder or a pattern) on this machine, as they are come upon."""
    if os.path.isdir(source):
        for folder, folders, names in os.walk(source, onerror=partial(_refuse, source)):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
    elif glob.has_magic(source) and not os.path.exists(source):
        yield from (Path(name) for name in glob.iglob(source, recursive=True) if os.path.isfile(name))
    else:
        yield Path(source)


def _refuse(source: str, error: OSError) -> None:
    """Raise the error if the source itself cannot be read; folders in it are left out, as the runtime does."""
    if error.filename == source:
        raise error


def _read(path: Path, data: DataSpec) -> RecordKind | None:
    """Check a file, and return what its records hold; None for files of tokens and of text, and empty files."""
    if not path.is_file():
        raise DataError(f"{path} is not a regular file")
    format = format_of(path, data.format)
    if format in ("jsonl", "parquet", "arrow"):
        return _records(path, format, data)
    if data.records not in ("auto", "text"):
        help = "write the records as JSONL, Parquet or Arrow files, or drop data.records"
        raise DataError(f"{path} has no records that could hold {data.records} data", help)
    if format in ("tokens", "megatron"):
        with path.open("rb"):
            (check_tokens if format == "tokens" else check_megatron)(path)
        return None
    decodes = data.tokenizer != "bytes"
    with path.open("rb") as file:
        start = file.read(_MOST_BYTES if decodes else 1)
    if decodes:
        check_text(start, path)
    return None


def _records(path: Path, format: Format, data: DataSpec) -> RecordKind | None:
    kind = None if data.records == "auto" else data.records
    for record, origin in _first_records(path, format):
        kind = kind or recognise(record, data, origin)
        if kind == "text":
            text_of(record, data.text_field, origin)
        else:
            parse(record, kind, data, origin)
    return kind


def _first_records(path: Path, format: Format) -> Iterator[tuple[Record, str]]:
    if format != "jsonl":
        yield from islice(records_in(path, format), _LINES)
        return
    with path.open("rb") as file:
        start = file.read(_MOST_BYTES)
    # The last line may be incomplete.
    lines = start.split(b"\n")[: _LINES if len(start) < _MOST_BYTES else -1]
    for number, line in enumerate(lines[:_LINES], start=1):
        if line.strip():
            origin = f"{path}:{number}"
            yield record_of(line, origin), origin
