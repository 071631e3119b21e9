"""Claims: small files beside the state. They name the state's owner, so that a run can report older, killed runs.

The state's own files are unlinked: the system frees their space when the process ends, for whatever reason, and no
other program can open them. A claim is locked as long as its process lives. An unlocked claim was left by a process
that was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

_PREFIX, _SUFFIX = "partool-offload-", ".claim"


class Claim:
    """Record that this process keeps state in a folder; it lasts until :meth:`drop` or the end of the process."""

    def __init__(self, folder: Path, owner: str, size_bytes: int) -> None:
        """Make a claim and delete the claims of dead processes; raises OSError."""
        self.dead: list[str] = []
        """Descriptions of the owners of dead claims that were found."""
        with _alone(folder):
            for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
                if (whose := _cleared(path)) is not None:
                    self.dead.append(whose)
            self._descriptor, name = tempfile.mkstemp(_SUFFIX, _PREFIX, folder)
            self._path = Path(name)
            _lock(self._descriptor)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        claim = {"owner": owner, "process": os.getpid(), "host": socket.gethostname(), "began": began}
        os.write(self._descriptor, json.dumps({**claim, "bytes": size_bytes}).encode())

    def drop(self) -> None:
        """Delete the claim's file, which may be gone already."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from searching ``folder`` for dead claims within the context."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file or folder; return True on success, and on file systems that do not support locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _cleared(path: Path) -> str | None:
    """Remove a claim that no process locks, and return a description of its owner; None if the claim is in use."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None  # its owner has just removed it, or it belongs to another user
    try:
        if not _lock(descriptor):
            return None
        path.unlink(missing_ok=True)
        return _words(os.read(descriptor, 4096))
    finally:
        os.close(descriptor)


def _words(content: bytes) -> str:
    try:
        claim = json.loads(content)
        return f"{claim['owner']} (process {claim['process']} on {claim['host']}, begun {claim['began']})"
    except (ValueError, KeyError, TypeError):
        return "a rank"  # the owner was killed before it wrote its name
