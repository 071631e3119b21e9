"""One file of state on a local disk, read and written in blocks with checksums, bypassing the page cache.

The checksums are kept in memory. A checksum stored next to its block would miss a write that the disk acknowledged and
lost: block and checksum would both be old. Other processes do not read state files, so the files need no checksums.
XXH3 (https://xxhash.com) is about as fast as memory, measured at 11 GB/s per core. zlib's crc32 reaches 2.6 GB/s, so it
would occupy three cores for a disk of 7 GB/s.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from partool_runtime.offload.disk import problems

PAGE_BYTES = 4096
"""File offsets, lengths and memory addresses of direct transfers are multiples of this size."""
IO_BYTES = 2**22
"""Bytes per transfer, unless the bucket is smaller; a few such transfers in flight reach a disk's full speed."""


@dataclass(frozen=True, slots=True)
class FileBlock:
    """Section of the file that is transferred as a whole and has one checksum."""

    index: int
    place: int
    """Offset in the file in bytes; a multiple of the page size."""
    length: int
    """Length in bytes; a multiple of the page size."""


class Calls:
    """System calls; tests replace them by calls that fail."""

    def read(self, descriptor: int, buffer: memoryview, place: int) -> int:
        """Read into a buffer; return the number of bytes read."""
        return os.preadv(descriptor, [buffer], place)

    def write(self, descriptor: int, buffer: memoryview, place: int) -> int:
        """Write from a buffer; return the number of bytes written."""
        return os.pwritev(descriptor, [buffer], place)

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        """Reserve a file's space on the disk."""
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(descriptor, size_bytes)  # this file system allocates space only on writing


class StateFile:
    """An unlinked file of a fixed size, initially zeros. Any thread may read and write its blocks."""

    def __init__(self, folder: Path, size_bytes: int, blocks: int, *, what: str, calls: Calls | None = None) -> None:
        """Reserve the space; raises ConfigurationError PT667 (no folder), PT668 (not writable), PT669 (no space)."""
        self._folder, self._what, self._size_bytes = folder, what, size_bytes
        self._calls = calls or Calls()
        self._sums: list[int | None] = [None] * blocks
        """Checksum of each block; None for a block that was never written, which holds zeros."""
        if not folder.is_dir():
            raise problems.no_folder(folder, what)
        self._cached = self._direct = -1
        try:
            self._cached = _nameless(folder)
            self._calls.reserve(self._cached, size_bytes)
            self._direct = self._opened_directly()
        except OSError as error:
            self.close()
            raise problems.cannot_begin(error, folder, what, size_bytes, _free_bytes(folder)) from error

    @property
    def direct(self) -> bool:
        """True if transfers bypass the page cache."""
        return self._direct >= 0

    def read(self, block: FileBlock, into: memoryview) -> None:
        """Read a block and compare its checksum; raises ConfigurationError PT671, PT672 or PT673."""
        expected = self._sums[block.index]
        if expected is None:
            into[:] = bytes(block.length)
            return
        self._transfer(block, into, write=False)
        if xxh3_64_intdigest(into) != expected:
            raise problems.damaged(self._folder, self._what, block.place, block.length)

    def write(self, block: FileBlock, content: memoryview) -> None:
        """Write a block; raises ConfigurationError PT670 (full or read-only) or PT671."""
        self._sums[block.index] = xxh3_64_intdigest(content)
        self._transfer(block, content, write=True)

    def mapped(self) -> mmap.mmap:
        """Return the whole file, memory-mapped through the page cache; call :meth:`check` before reading a block."""
        size_bytes = os.fstat(self._cached).st_size
        if size_bytes < self._size_bytes:
            raise problems.too_short(self._folder, self._what, self._size_bytes - 1, size_bytes)
        return mmap.mmap(self._cached, self._size_bytes)

    def check(self, block: FileBlock, scratch: memoryview) -> None:
        """Load a block into the page cache, which a mapping reads, and compare its checksum; raises like :meth:`read`.

        The block is not read through the mapping itself, where a disk error kills the process by a signal.
        """
        expected = self._sums[block.index]
        if expected is None:
            return
        self._transfer(block, scratch[: block.length], write=False, cached=True)
        if xxh3_64_intdigest(scratch[: block.length]) != expected:
            raise problems.damaged(self._folder, self._what, block.place, block.length)

    def adopt(self, block: FileBlock, scratch: memoryview) -> None:
        """Store the checksum of a block's current content, which was written through a mapping."""
        self._transfer(block, scratch[: block.length], write=False, cached=True)
        self._sums[block.index] = xxh3_64_intdigest(scratch[: block.length])

    def settle(self) -> None:
        """Wait until the disk has stored all writes; raises ConfigurationError PT670 or PT671."""
        try:
            os.fsync(self._cached)
        except OSError as error:
            raise problems.failed(error, self._folder, self._what) from error

    def forget(self) -> None:
        """Drop the file's pages, which :meth:`settle` has written to the disk, from the page cache."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; the system frees its disk space once no mapping of the file exists any more."""
        for descriptor in {self._cached, self._direct} - {-1}:
            os.close(descriptor)
        self._cached = self._direct = -1

    def _transfer(self, block: FileBlock, memory: memoryview, *, write: bool, cached: bool = False) -> None:
        """Transfer a whole block, by as many system calls as needed."""
        descriptor = self._cached if cached or not self.direct else self._direct
        call = self._calls.write if write else self._calls.read
        transferred_bytes = 0
        try:
            while transferred_bytes < block.length:
                moved = transferred_bytes + call(
                    descriptor, memory[transferred_bytes:], block.place + transferred_bytes
                )
                # A transfer may be cut short anywhere, but a direct transfer has to begin at a page.
                begin = moved if moved == block.length else moved - moved % PAGE_BYTES
                if begin <= transferred_bytes:
                    self._stuck(block.place + moved, write)
                transferred_bytes = begin
        except OSError as error:
            raise problems.failed(error, self._folder, self._what) from error

    def _stuck(self, place: int, write: bool) -> None:
        """Raise the error for a transfer at which the system moved less than a page."""
        size_bytes = os.fstat(self._cached).st_size
        if not write and size_bytes <= place:
            raise problems.too_short(self._folder, self._what, place, size_bytes)
        raise OSError(errno.EIO, f"{'writes' if write else 'reads'} at byte {place:,} move nothing")

    def _opened_directly(self) -> int:
        """Return a tested descriptor for direct transfers; -1 if the file system does not support direct transfers."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag or self._size_bytes < PAGE_BYTES:
            return -1
        try:
            descriptor = os.open(f"/proc/self/fd/{self._cached}", os.O_RDWR | flag)
        except OSError:
            return -1
        try:
            self._calls.write(descriptor, memoryview(mmap.mmap(-1, PAGE_BYTES)), 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno != errno.EINVAL:
                raise
            return -1
        return descriptor


def _nameless(folder: Path) -> int:
    """Return a descriptor of a new, unlinked file that no other process can open."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
    descriptor, name = tempfile.mkstemp(".state", "partool-offload-", folder)
    Path(name).unlink()
    return descriptor


def _free_bytes(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None
