"""The token cache as planning sees it: where it is, and the lengths of the documents in it.

The folder of a cache holds ``tokens.bin``, ``tokens.documents.bin`` and the sidecar ``tokens.json``; caches of
conversations also ``tokens.loss.bin`` (uint8, 1 for each token that is trained on) and ``tokens.trained.bin`` (int64,
the first and the last of these in each document).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partool.plan.data_files import SourceFile, find_files
from partool.plan.records import DataError
from partool.plan.token_files import Sidecar, read_sidecar
from partool.plan.tokenizer_folder import tokenizer_files
from partool.spec.data import DataSpec

if TYPE_CHECKING:
    from partool.plan.packing import Lengths

_VERSION = 3
TOKENISED = ("text", "jsonl", "parquet", "arrow")
"""Formats of files that are tokenised into a cache; files of tokens are read in place."""


def cache_folder(configured: str | None) -> Path:
    """Return ``data.cache``, else ``$PARTOOL_CACHE``, else ``partool/tokens`` in the user's cache folder."""
    if configured is not None:
        return Path(configured)
    if chosen := os.environ.get("PARTOOL_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "partool", "tokens")


def cache_of(files: Sequence[SourceFile], data: DataSpec) -> Path:
    """Return the folder of the cache of some files: its name is a hash of all that decides the tokens.

    Raises OSError where a file of the tokenizer or the chat template cannot be read.
    """
    described = [[str(f.path), f.format, f.size_bytes, f.mtime_ns] for f in files]
    content: list[Any] = [_VERSION, described, _tokenizer(data), "text" if data.is_text else data.records]
    if data.is_text:
        content.append(data.text_field)
    else:
        template = Path(data.template).read_text(encoding="utf-8") if data.template else None
        content += [sorted(data.keys.items()), sorted(data.roles.items()), data.loss, template]
    text = json.dumps(content).encode("utf-8", "surrogateescape")
    return cache_folder(data.cache) / hashlib.sha256(text).hexdigest()[:32]


def _tokenizer(data: DataSpec) -> list[Any]:
    if data.tokenizer == "bytes":
        return ["bytes-0"]
    folder = Path(data.tokenizer)
    hashes = [[str(path), hashlib.sha256((folder / path).read_bytes()).hexdigest()] for path in tokenizer_files(folder)]
    return [*hashes, data.special_tokens]


def stretches(files: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """Return the files in groups of neighbours: files of tokens are read in place, each other group has one cache."""
    return [list(group) for _, group in groupby(files, lambda file: file.format in TOKENISED)]


@dataclass(frozen=True, slots=True)
class PreparedTokens:
    """What a cache says of the tokens in it."""

    lengths: Lengths
    sidecar: Sidecar


def prepared(data: DataSpec) -> PreparedTokens | None:
    """Return the lengths of a ``data`` section's documents, if its files are tokenised already; None otherwise.

    The section has absolute paths and says what its records are. Files of tokens are not counted: None.
    """
    try:
        groups = stretches(find_files(data.source, data.format))
        if len(groups) != 1 or groups[0][0].format not in TOKENISED:
            return None
        return _read(cache_of(groups[0], data))
    except (DataError, OSError, ValueError):  # a damaged cache, too: the next run makes it anew
        return None


def _read(folder: Path) -> PreparedTokens | None:
    import numpy as np

    from partool.plan.packing import Lengths

    if not folder.is_dir():
        return None
    sidecar = read_sidecar(folder / "tokens.bin")
    if sidecar.documents is None:
        return None
    offsets = np.fromfile(folder / sidecar.documents, dtype="<i8").astype(np.int64)
    tokens = np.diff(offsets)
    if sidecar.trained is None:
        return PreparedTokens(Lengths.of_text(tokens), sidecar)
    bounds = np.fromfile(folder / sidecar.trained, dtype="<i8").astype(np.int64).reshape(len(tokens), 2)
    return PreparedTokens(Lengths(tokens, bounds[:, 0], bounds[:, 1]), sidecar)
