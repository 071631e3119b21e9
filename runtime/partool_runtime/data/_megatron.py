"""Megatron's indexed datasets: ``.bin`` with the tokens, ``.idx`` with what is where.

Layout of the index, little-endian: 9 bytes ``MMIDIDX\\0\\0``; version (u64, 1); dtype code (u8); number of sequences
(u64); number of document boundaries (u64); length of every sequence (int32); its place in the .bin in bytes (int64);
document boundaries, counted in sequences from 0 (int64).
Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from partool_runtime.data._shards import Shard, check_offsets, map_array
from partool_runtime.errors import ConfigurationError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_megatron(path: Path) -> Shard:
    """Open a ``.bin`` by its ``.idx``; raises ConfigurationError PT602 where the two are malformed or disagree."""
    index = path.with_suffix(".idx")
    dtype, sequences, boundaries = _read_header(index)
    at = _HEADER.size
    lengths = map_array(index, np.dtype("<i4"), at, sequences)
    pointers = map_array(index, np.dtype("<i8"), at + 4 * sequences, sequences)
    documents = map_array(index, np.dtype("<i8"), at + 12 * sequences, boundaries, exact=True)
    check_offsets(documents, sequences, index)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    if (lengths < 0).any() or (pointers != starts[:-1] * dtype.itemsize).any():
        raise ConfigurationError("PT602", f"{index}: sequences do not follow each other without gaps")
    tokens = map_array(path, dtype, 0, int(starts[-1]), exact=True)
    return Shard(tokens, starts[np.asarray(documents)], path)


def _read_header(index: Path) -> tuple[np.dtype[np.generic], int, int]:
    try:
        with index.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        raise ConfigurationError("PT602", f"{index} cannot be read: {error.strerror}") from error
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise ConfigurationError("PT602", f"{index} is not a Megatron index (it does not begin with MMIDIDX)")
    _, version, code, sequences, boundaries = _HEADER.unpack(head)
    if version != 1:
        raise ConfigurationError("PT602", f"{index} has version {version}; only version 1 is known")
    if code not in _DTYPES:
        known = ", ".join(f"{number} {np.dtype(name).name}" for number, name in _DTYPES.items())
        raise ConfigurationError("PT602", f"{index} has dtype code {code}; integers are: {known}")
    return np.dtype(_DTYPES[code]), sequences, boundaries
