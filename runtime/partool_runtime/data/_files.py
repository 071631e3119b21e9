"""Resolution of ``data.source`` to files: names, globs, folders and the standard library, in a stable order."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from partool.plan.records import DataError, Format, format_of, stdlib_files
from partool.spec.training import DataFormat, DataSpec
from partool_runtime.errors import ConfigurationError

PYTHON_STDLIB = "python-stdlib"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the source; its size and modification time show whether it has changed."""

    path: Path
    format: Format
    size_bytes: int
    mtime_ns: int


def find_files(data: DataSpec) -> list[SourceFile]:
    """Return the files of ``data.source`` without duplicates, in the order of the sources and by path within a source.

    Raises ConfigurationError PT601 if a source has no files or a file cannot be read, PT602 for a format that is not
    supported.
    """
    sources = [data.source] if isinstance(data.source, str) else data.source
    paths: dict[Path, None] = {}
    empty = []
    for source in sources:
        matches = list(_expand(source))
        if not matches:
            empty.append(source)
        paths.update(dict.fromkeys(matches))
    if empty or not paths:
        what = ", ".join(repr(source) for source in empty) or "an empty list"
        raise ConfigurationError(
            "PT601", f"data.source has no files: {what}", "name files, globs such as data/**/*.txt, or folders"
        )
    files = [_describe(path, data.format) for path in paths if not _is_companion(path, data.format)]
    if not files:
        raise ConfigurationError("PT601", f"data.source names only indexes and sidecars: {', '.join(sources)}")
    return files


def _expand(source: str) -> Iterator[Path]:
    if source == PYTHON_STDLIB:
        yield from sorted(stdlib_files())
        return
    path = Path(os.path.abspath(source))
    if path.is_dir():
        yield from _walk(path)
    elif path.exists():
        yield path
    elif glob.has_magic(source):
        matches = (Path(os.path.abspath(name)) for name in glob.glob(source, recursive=True))
        yield from sorted(match for match in matches if match.is_file())


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files below a folder, sorted by path; hidden files and folders and linked folders are skipped."""
    files_below = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files_below += [Path(folder, name) for name in files if not name.startswith(".")]
    yield from sorted(path for path in files_below if path.is_file())


def _is_companion(path: Path, wanted: str) -> bool:
    """Return True for the index or sidecar of a ``.bin`` file; globs and folders match these files, too."""
    if wanted in ("text", "jsonl", "parquet"):
        return False
    if path.suffix in (".idx", ".json"):
        return path.with_suffix(".bin").is_file()
    return path.name.endswith(".documents.bin") and Path(str(path).removesuffix(".documents.bin") + ".json").is_file()


def _describe(path: Path, wanted: DataFormat) -> SourceFile:
    if not path.is_file():
        raise ConfigurationError("PT601", f"{path} is not a regular file")
    try:
        status = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigurationError("PT601", f"{path} cannot be read: {error.strerror}") from error
    try:
        return SourceFile(path, format_of(path, wanted), status.st_size, status.st_mtime_ns)
    except DataError as error:
        raise ConfigurationError("PT602", str(error), error.help) from error
