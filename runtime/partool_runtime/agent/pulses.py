"""The agent's side of the ranks' pulses: the files that it shares with its ranks."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from partool_runtime.pulse import PAGE_BYTES, RankProgress, read

_FOLDERS = (Path("/dev/shm"), Path(tempfile.gettempdir()))
"""Folders for the files, best first."""
_LONGEST_STACK_BYTES = 1 << 20


class RankPulse:
    """The file of one rank in one attempt."""

    def __init__(self, folder: Path) -> None:
        """Make the file in a folder; raises OSError if the folder is full or cannot be written."""
        descriptor, path = tempfile.mkstemp(prefix="partool-pulse-", dir=folder)
        self._file: BinaryIO = os.fdopen(descriptor, "r+b", buffering=0)
        self.path = Path(path)
        """Name of the file until the rank has opened it."""
        try:
            # The page is taken now: on a full file system a later access to it would end the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            self._page = mmap.mmap(descriptor, PAGE_BYTES)
        except OSError:
            self._file.close()
            self.path.unlink(missing_ok=True)
            raise

    def progress(self) -> RankProgress:
        """Return how far the rank has come."""
        return read(self._page)

    def stack(self) -> str:
        """Return the stacks that the rank has written; empty if it has written none."""
        text = os.pread(self._file.fileno(), _LONGEST_STACK_BYTES, PAGE_BYTES)
        return text.decode(errors="replace")

    def close(self) -> None:
        """Release the memory and remove the file's name, which a rank that never began has left."""
        self._page.close()
        self._file.close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


class Pulses:
    """The pulses of this node's ranks, in files of the first of ``folders`` that has room for them."""

    def __init__(self, folders: Sequence[Path] = _FOLDERS) -> None:
        self._folders = folders
        self._ranks: dict[int, RankPulse] = {}

    def open(self, rank: int) -> Path | None:
        """Make the file of a rank for a new attempt and return its path.

        Returns None if no folder has room for it: the rank is then not watched.
        """
        if rank in self._ranks:
            self._ranks.pop(rank).close()
        for folder in self._folders:
            with suppress(OSError):
                self._ranks[rank] = RankPulse(folder)
                return self._ranks[rank].path
        return None

    def progress(self) -> dict[int, RankProgress]:
        """Return how far each rank has come, by rank."""
        return {rank: pulse.progress() for rank, pulse in self._ranks.items()}

    def stack(self, rank: int) -> str:
        """Return the stacks that a rank has written; empty if it has written none."""
        return self._ranks[rank].stack() if rank in self._ranks else ""

    def close(self) -> None:
        """Release all files."""
        while self._ranks:
            self._ranks.popitem()[1].close()
