"""Measures the rate at which this machine writes to the file system of its runs, as its ranks write a checkpoint."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from partool_runtime.calibrate.fit import summary

MOST_BYTES = {"full": 1 << 28, "quick": 1 << 26, "tiny": 1 << 20}
"""Size of the measurement → bytes that all files of one repeat have together, at most."""
_REPEATS = 3
_PROBE_SHARE = 16
"""Ratio of the most bytes to the bytes of the first, unmeasured write, which tells how much can be written in time."""
_PIECE_BYTES = 1 << 22
_FREE_TIMES = 4
"""Least ratio of free space to the most bytes: the disk of other users is not filled up."""


def storage_line(folder: Path, writers: int, most_bytes: int, seconds: float) -> dict[str, Any]:
    """Return the measurement of the file system of ``folder``, which need not exist: bytes of a repeat and its time.

    In a repeat each of ``writers`` writes a new file and synchronises it with the disk, all at once, as the ranks of a
    node do with a checkpoint. A repeat of slow storage writes less than ``most_bytes``, so that it takes about
    ``seconds``. Raises OSError if the folder cannot be written, or if it has little space.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    if (free := shutil.disk_usage(existing).free) < _FREE_TIMES * most_bytes:
        raise OSError(errno.ENOSPC, f"only {free >> 20} MiB are free", str(existing))
    with (
        tempfile.TemporaryDirectory(dir=existing, prefix=".partool-calibrate-") as scratch,
        ThreadPoolExecutor(writers) as pool,
    ):
        piece = os.urandom(_PIECE_BYTES)  # a file system that compresses gains nothing
        names = (Path(scratch) / str(number) for number in itertools.count())

        def repeat(each_bytes: int) -> float:
            files = list(itertools.islice(names, writers))
            begin = time.perf_counter()
            list(pool.map(lambda file: _write(file, piece, each_bytes), files))
            elapsed = time.perf_counter() - begin
            for file in files:
                file.unlink()
            return elapsed

        probe_bytes = most_bytes // _PROBE_SHARE
        probe_s = repeat(max(1, probe_bytes // writers))
        in_time = int(probe_bytes * min(_PROBE_SHARE, max(1.0, seconds / probe_s)))
        each_bytes = max(1, in_time // writers)
        n, median, mad = summary([repeat(each_bytes) for _ in range(_REPEATS)])
    name = f"write and fsync of {writers} file{'s' * (writers > 1)}"
    return {
        "kind": "storage", "name": name, "precision": "", "work": float(each_bytes * writers), "work_unit": "byte",
        "elements": 0.0, "length": 0, "seconds": median, "mad_s": mad, "n": n,
    }  # fmt: skip


def _write(file: Path, piece: bytes, size: int) -> None:
    content = memoryview(piece)
    with file.open("wb", buffering=0) as stream:
        written = 0
        while written < size:
            written += stream.write(content[: size - written])
        os.fsync(stream.fileno())
