"""File system operations of checkpoints: durable, hashed, and replaceable by tests that inject failures."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystem

_BUFFER_BYTES = 1 << 20


def new_hash() -> Any:
    """Return the hash used for checksums."""
    return hashlib.blake2b(digest_size=16)


def file_digest(path: Path) -> str:
    """Return the checksum of a file's content, read in pieces."""
    digest = new_hash()
    with path.open("rb", buffering=0) as stream:
        while piece := stream.read(8 * _BUFFER_BYTES):
            digest.update(piece)
    return str(digest.hexdigest())


class Files:
    """The operations that change the file system."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents; it may exist."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically; a file at ``target`` is replaced."""
        source.rename(target)

    def remove_file(self, path: Path) -> None:
        """Delete a file; it may be missing already."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder with its content; it may be missing already."""
        if path.exists():
            shutil.rmtree(path)

    def open_new(self, path: Path) -> IO[bytes]:
        """Open a file for writing, and empty it if it exists."""
        return path.open("wb", buffering=_BUFFER_BYTES)

    def write(self, stream: IO[bytes], data: bytes | memoryview) -> None:
        """Write all of ``data``."""
        stream.write(data)

    def finish(self, stream: IO[bytes]) -> None:
        """Flush a file, sync it to the disk, and close it."""
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()

    def sync_folder(self, path: Path) -> None:
        """Sync the entries of a folder to the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int | None:
        """Return the space left for this user, or None where the file system does not report it."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize if status.f_blocks else None


class HashedFile(io.RawIOBase):
    """A file being written, with its size and checksum so far; it keeps the error of a failed write.

    torch's serializer replaces an error of ``write`` by another error without the ``errno``, so the error is kept here.
    """

    def __init__(self, files: Files, path: Path) -> None:
        super().__init__()
        self._files = files
        self._stream = files.open_new(path)
        self._digest = new_hash()
        self.size_bytes = 0
        self.error: BaseException | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size_bytes

    def write(self, data: Any, /) -> int:
        """Write all of ``data`` and return its length in bytes."""
        view = memoryview(data).cast("B")
        try:
            self._files.write(self._stream, view)
        except BaseException as error:
            self.error = error
            raise
        self._digest.update(view)
        self.size_bytes += view.nbytes
        return view.nbytes

    def finish(self) -> tuple[int, str]:
        """Sync the file to the disk and return its size in bytes and its checksum."""
        self._files.finish(self._stream)
        return self.size_bytes, str(self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file after an error."""
        try:
            self._stream.close()
        except OSError:
            pass  # unflushed data is deleted with the file


class HashedFileSystem(FileSystem):
    """The file system as DCP uses it; writes are hashed, reads are not.

    ``written`` maps file names to size and checksum.
    """

    def __init__(self, files: Files) -> None:
        super().__init__()
        self._files = files
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file; a new file is synced to the disk when the ``with`` block ends."""
        if mode != "wb":
            with Path(path).open(mode) as plain:
                yield plain  # type: ignore[misc]
            return
        stream = HashedFile(self._files, Path(path))
        try:
            yield stream
            self.written[Path(path).name] = stream.finish()
        except BaseException as error:
            stream.abandon()
            if stream.error is not None and stream.error is not error:
                raise stream.error from error
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and its key in ``written``."""
        self._files.rename(Path(path), Path(new_path))
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Create a folder."""
        self._files.make_folder(Path(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Delete a file."""
        self._files.remove_file(Path(path))


class FolderLock:
    """Lock that lets only one run write into a folder; the system releases it when the process ends for any reason."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def acquire(self) -> bool:
        """Take the lock; return False if another process holds it. Always succeeds on file systems without locks."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)
