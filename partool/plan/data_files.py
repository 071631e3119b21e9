"""Resolution of ``data.source`` to files: names, globs, folders and the standard library, in a stable order."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from partool.plan.records import DataError, Format, format_of, stdlib_files
from partool.spec.data import DataFormat

PYTHON_STDLIB = "python-stdlib"
_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files that ``datasets.save_to_disk`` writes beside Arrow files, or above their folders."""


class NoFilesError(DataError):
    """A source without files, or files that cannot be opened."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the source; its size and modification time show whether it has changed."""

    path: Path
    format: Format
    size_bytes: int
    mtime_ns: int


def find_files(source: str | Sequence[str], format: DataFormat) -> list[SourceFile]:
    """Return the files of ``data.source`` without duplicates, in the order of the sources and by path within a source.

    Raises NoFilesError if a source has no files or a file cannot be opened, DataError for a format that is not
    supported.
    """
    sources = [source] if isinstance(source, str) else source
    paths: dict[Path, None] = {}
    empty = []
    for each in sources:
        matches = list(_expand(each))
        if not matches:
            empty.append(each)
        paths.update(dict.fromkeys(matches))
    if empty or not paths:
        what = ", ".join(repr(each) for each in empty) or "an empty list"
        raise NoFilesError(f"data.source has no files: {what}", "name files, globs such as data/**/*.txt, or folders")
    files = [_describe(path, format) for path in paths if not is_companion(path, format)]
    if not files:
        raise NoFilesError(f"data.source names only indexes and sidecars: {', '.join(sources)}")
    return files


def is_companion(path: Path, wanted: DataFormat) -> bool:
    """Return True for a file that describes others: an index or sidecar of a ``.bin`` file, or of a saved data set.

    Globs and folders match these files, too. Raises DataError for the description of several data sets.
    """
    if wanted in ("text", "jsonl", "parquet"):
        return False
    if path.name == _DICT:
        raise DataError(f"{path.parent} holds several data sets", f"name one, such as {_first_split(path)}")
    if path.name in (_STATE, _INFO) and any(path.parent.glob("*.arrow")):
        return True
    if path.suffix == ".arrow":
        return path.name not in _data_files(path)
    if path.suffix in (".idx", ".json"):
        return path.with_suffix(".bin").is_file()
    return path.name.endswith(".documents.bin") and Path(str(path).removesuffix(".documents.bin") + ".json").is_file()


def _first_split(description: Path) -> str:
    try:
        names = json.loads(description.read_bytes())["splits"]
        return str(description.parent / str(names[0]))
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return f"{description.parent}/train"


def _data_files(path: Path) -> list[str]:
    """Return the names of a saved data set's files; other files are caches. Without a description, it is ``path``."""
    try:
        listed = json.loads((path.parent / _STATE).read_bytes())["_data_files"]
        return [str(each["filename"]) for each in listed]
    except (OSError, ValueError, KeyError, TypeError):
        return [path.name]


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


def _describe(path: Path, wanted: DataFormat) -> SourceFile:
    if not path.is_file():
        raise NoFilesError(f"{path} is not a regular file")
    try:
        status = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise NoFilesError(f"{path} cannot be read: {error.strerror}") from error
    return SourceFile(path, format_of(path, wanted), status.st_size, status.st_mtime_ns)
