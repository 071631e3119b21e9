"""The descriptions beside files of tokens, read without numpy; planning and the run report equal errors.

A ``.bin`` of tokens has a sidecar of partool's, or an index of Megatron's
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from partool.plan.records import DataError

TOKEN_BYTES = {"uint16": 2, "uint32": 4}
"""Sizes of the types of tokens that a sidecar may name."""
INDEX_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Types of tokens by their code in an index of Megatron's."""
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What the sidecar of a file of tokens says."""

    dtype: str
    """``uint16`` or ``uint32``."""
    count: int
    """Number of tokens."""
    vocab: int
    documents: str | None
    """Name of the file of the documents' first tokens; None if all tokens are one document."""
    left_out: int
    first_left_out: str
    loss: str | None = None
    """Name of the file that says which tokens are trained on; None if all are."""
    trained: str | None = None
    """Name of the file of the first and last such token of each document."""
    masked: int = 0
    """Number of documents of which no token is trained on."""
    first_masked: str = ""
    notes: tuple[str, ...] = ()
    """What is doubtful about the tokens, in sentences."""


@dataclass(frozen=True, slots=True)
class Index:
    """The header of an index of Megatron's."""

    dtype: str
    sequences: int
    boundaries: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return int(self.dtype.lstrip("uint")) // 8


def read_sidecar(path: Path) -> Sidecar:
    """Return the sidecar of a file of tokens; raises DataError."""
    sidecar = path.with_suffix(".json")
    try:
        meta = json.loads(sidecar.read_text(encoding="utf-8"))
        dtype, count, vocab = str(meta["dtype"]), int(meta["count"]), int(meta["vocab"])
        left_out, first_left_out = int(meta.get("left_out", 0)), str(meta.get("first_left_out", ""))
        masked, first_masked = int(meta.get("masked", 0)), str(meta.get("first_masked", ""))
        notes = tuple(str(note) for note in meta.get("notes", ()))
        names = {key: None if meta.get(key) is None else str(meta[key]) for key in ("documents", "loss", "trained")}
        if dtype not in TOKEN_BYTES:
            raise KeyError(dtype)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = f"{sidecar} is not a sidecar of tokens: {type(error).__name__} {error}"
        raise DataError(message, 'it holds "dtype" (uint16 or uint32), "count" and "vocab"') from error
    files = names["documents"], left_out, first_left_out, names["loss"], names["trained"]
    return Sidecar(dtype, count, vocab, *files, masked, first_masked, notes)


def read_index(index: Path) -> Index:
    """Return the header of an index of Megatron's; raises DataError."""
    try:
        with index.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"{index} cannot be read: {error.strerror}") from error
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise DataError(f"{index} is not a Megatron index (it does not begin with MMIDIDX)")
    _, version, code, sequences, boundaries = _HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{index} has version {version}; only version 1 is known")
    if code not in INDEX_TYPES:
        types = ", ".join(f"{number} {name}" for number, name in INDEX_TYPES.items())
        raise DataError(f"{index} has dtype code {code}; integers are: {types}")
    return Index(INDEX_TYPES[code], sequences, boundaries)


def check_size(path: Path, count: int, item_bytes: int, dtype: str, offset: int = 0, *, exact: bool = True) -> None:
    """Raise DataError unless a file holds ``count`` values from byte ``offset`` on and, with ``exact``, no more."""
    need = offset + count * item_bytes
    size = path.stat().st_size if path.is_file() else 0
    if count < 0 or size < need or (exact and size != need):
        raise DataError(f"{path} has {size} bytes where {need} are expected ({count} values of {dtype})")


def check_tokens(path: Path) -> None:
    """Raise DataError if a file of tokens, or that of its documents, has another size than the sidecar says."""
    sidecar = read_sidecar(path)
    check_size(path, sidecar.count, TOKEN_BYTES[sidecar.dtype], sidecar.dtype)
    if sidecar.documents is not None:
        file = path.with_name(sidecar.documents)
        check_size(file, (file.stat().st_size if file.is_file() else 0) // 8, 8, "int64")
        with file.open("rb") as offsets:
            if _last(offsets, "<q", -8) != sidecar.count:
                message = f"{file}: document offsets must go from 0 to the number of tokens, {sidecar.count}"
                raise DataError(message)


def check_megatron(path: Path) -> None:
    """Raise DataError if a file of tokens, or its index, has another size than the index says."""
    file = path.with_suffix(".idx")
    index = read_index(file)
    of_boundaries = HEADER_BYTES + 12 * index.sequences
    check_size(file, index.boundaries, 8, "int64", of_boundaries)
    if index.sequences:
        with file.open("rb") as entries:
            length = _last(entries, "<i", HEADER_BYTES + 4 * (index.sequences - 1))
            start = _last(entries, "<q", of_boundaries - 8)
        check_size(path, start // index.token_bytes + length, index.token_bytes, index.dtype)


def _last(file: BinaryIO, form: str, at: int) -> int:
    """Return the number at a place of a file, counted from its end if negative; −1 if the file is too short."""
    size = struct.calcsize(form)
    try:
        file.seek(at, 2 if at < 0 else 0)
        number: int = struct.unpack(form, file.read(size))[0]
    except (OSError, struct.error):
        return -1
    return number
