"""Reads the records of JSONL, Parquet and Arrow files; Arrow files are those that ``datasets.save_to_disk`` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partool.plan.records import DataError, Format, Record, record_of

_ROWS = 256
"""Number of rows of a table that are in memory at once."""
_NAMES = {"parquet": "Parquet", "arrow": "Arrow"}


def records_in(path: Path, format: Format, column: str | None = None) -> Iterator[tuple[Record, str]]:
    """Yield the records of a JSONL, Parquet or Arrow file, in order, each with its file and line or row for messages.

    ``column`` is the only column of a table that is read, by default all are. Tables are opened and the column looked
    up at once; rows are read lazily. Raises DataError for a malformed line, where the package pyarrow is missing, the
    file cannot be read, or the column is missing; OSError where the system refuses to read the file.
    """
    if format == "jsonl":
        return _lines(path)
    return _rows(_table(path, format, column), path)


def _lines(path: Path) -> Iterator[tuple[Record, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                origin = f"{path}:{number}"
                yield record_of(line, origin), origin


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of which batches of rows are read one after the other."""

    names: list[str]
    batches: Callable[[list[str] | None], Iterator[Any]]
    close: Callable[[], None]
    columns: list[str] | None = None


def _table(path: Path, format: Format, column: str | None) -> _Table:
    try:
        import pyarrow
    except ImportError as error:
        help = "pip install 'partool[parquet]', or write the records as JSONL"
        message = f"{path}: {_NAMES[format]} files are read with pyarrow, which is not installed"
        raise DataError(message, help) from error
    try:
        table = _arrow(path) if format == "arrow" else _parquet(path)
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{path} is no {_NAMES[format]} file: {str(error).splitlines()[0]}") from error
    if column is None:
        return table
    if column not in table.names:
        table.close()
        columns = ", ".join(sorted(table.names)) or "none"
        help = "set data.text_field to the text's column"
        raise DataError(f"{path} has no column {column!r} (its columns: {columns})", help)
    return _Table(table.names, table.batches, table.close, [column])


def _parquet(path: Path) -> _Table:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)

    def batches(columns: list[str] | None) -> Iterator[Any]:
        parts: Iterator[Any] = file.iter_batches(batch_size=_ROWS, columns=columns)
        return parts

    return _Table(list(file.schema_arrow.names), batches, file.close)


def _arrow(path: Path) -> _Table:
    """Open an Arrow file: a stream of batches, as ``datasets`` writes it, or a file with an index at its end."""
    import pyarrow

    source = pyarrow.memory_map(str(path))
    try:
        reader = pyarrow.ipc.open_stream(source)
        stored: Iterator[Any] = iter(reader)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        reader = pyarrow.ipc.open_file(source)
        stored = map(reader.get_batch, range(reader.num_record_batches))

    def batches(columns: list[str] | None) -> Iterator[Any]:
        for batch in stored:
            chosen = batch if columns is None else batch.select(columns)
            for first in range(0, batch.num_rows, _ROWS):
                yield chosen.slice(first, _ROWS)

    return _Table(list(reader.schema.names), batches, source.close)


def _rows(table: _Table, path: Path) -> Iterator[tuple[Record, str]]:
    import pyarrow

    row = 0
    try:
        for batch in table.batches(table.columns):
            for record in batch.to_pylist():
                row += 1
                yield record, f"{path}: row {row}"
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read after row {row}: {reason}") from error
    finally:
        table.close()
