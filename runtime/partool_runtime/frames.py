"""Frames on pipes between processes: parts of bytes behind their lengths.

Nothing is pickled, as in all of partool: a pickle could name any function for its reader to call.
"""

from __future__ import annotations

import struct
from typing import IO

_LENGTH = struct.Struct("<Q")


def write_frame(pipe: IO[bytes], *parts: bytes) -> None:
    """Write parts as one frame, each behind its length in bytes."""
    pipe.write(_LENGTH.pack(len(parts)))
    for part in parts:
        pipe.write(_LENGTH.pack(len(part)))
        pipe.write(part)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> list[bytes]:
    """Return the parts of the next frame, none at the end; raises EOFError if a frame is cut."""
    head = pipe.read(_LENGTH.size)
    if not head:
        return []
    (count,) = _LENGTH.unpack(_exactly(head, _LENGTH.size))
    parts = []
    for _ in range(count):
        (size,) = _LENGTH.unpack(_exactly(pipe.read(_LENGTH.size), _LENGTH.size))
        parts.append(_exactly(pipe.read(size), size))
    return parts


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise EOFError
    return data
