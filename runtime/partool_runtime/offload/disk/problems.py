"""Errors and notes about a disk, which name the folder and a remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from partool_runtime.errors import ConfigurationError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_RESUME = "then go on with --resume: checkpoints are untouched, and the state is rebuilt from the last one"


def no_folder(folder: Path, what: str) -> ConfigurationError:
    """Return the error for a path that does not exist or is not a folder."""
    wrong = "is not a folder" if folder.exists() else "does not exist"
    return ConfigurationError(
        "PT667",
        f"{folder}, where the {what} is to be kept, {wrong} on this machine",
        "mount the disk or make the folder on every machine, or name another one in parallel.offload.dir",
    )


def cannot_begin(error: OSError, folder: Path, what: str, needed_bytes: int, free_bytes: int | None) -> Exception:
    """Return the error for a file that could not be created with the needed size."""
    if error.errno in _CLOSED:
        return ConfigurationError(
            "PT668",
            f"{folder}, where the {what} is to be kept, cannot be written: {error.strerror}",
            "make it writable for this user, or name another folder in parallel.offload.dir",
        )
    if error.errno in _FULL:
        free = "" if free_bytes is None else f", {free_bytes:,} bytes are free"
        return ConfigurationError(
            "PT669",
            f"the {what} of this rank needs {needed_bytes:,} bytes in {folder}{free}: {error.strerror}",
            "free some space, raise the quota or the limit on file sizes, or name a larger disk in "
            "parallel.offload.dir; more ranks need less each",
        )
    return failed(error, folder, what)


def failed(error: OSError, folder: Path, what: str) -> Exception:
    """Return the error for a transfer that failed during training."""
    if error.errno in _FULL + _CLOSED:
        mend = f"make room in {folder}, or make it writable" if error.errno in _FULL else f"make {folder} writable"
        message = f"the {what} cannot be written to {folder} any more: {error.strerror}"
        return ConfigurationError("PT670", message, f"{mend}, {_RESUME}")
    message = f"the disk of {folder}, where the {what} is kept, fails: {error.strerror or error}"
    return ConfigurationError("PT671", message, f"see dmesg, name another disk in parallel.offload.dir, {_RESUME}")


def too_short(folder: Path, what: str, place: int, size_bytes: int) -> ConfigurationError:
    """Return the error for a file that is shorter than the data written to it."""
    message = f"the file in {folder} that holds the {what} ends at byte {size_bytes:,}; byte {place:,} was written"
    return ConfigurationError("PT672", message, f"see what cuts files off there, {_RESUME}")


def damaged(folder: Path, what: str, place: int, length: int) -> ConfigurationError:
    """Return the error for a block whose content differs from what was written."""
    where = f"bytes {place:,} to {place + length:,} of the {what} in {folder}"
    message = f"{where} are not what was written: their checksum differs"
    return ConfigurationError(
        "PT673", message, f"check the disk, or name another one in parallel.offload.dir, {_RESUME}"
    )


def no_memory(error: Exception, buffers: int, each_bytes: int) -> ConfigurationError:
    """Return the error for buffers that do not fit into host memory."""
    message = f"the host has no memory for {buffers} buffers of {each_bytes:,} bytes: {error}"
    return ConfigurationError("PT674", message, "lower parallel.offload.buffers (3 at least) or bucket_mib")


def notes(folder: Path, what: str, direct: bool, dead: Sequence[str]) -> tuple[str, ...]:
    """Return notes for the run's log about ``folder``, and about killed runs whose claims were found in ``folder``."""
    lines = [
        f"{whose} was killed while it kept state in {folder}; nothing of that is read: the {what} is built again from "
        "the last checkpoint, or begins anew where there is none"
        for whose in dead
    ]
    if _in_memory(folder):
        lines.append(f"{folder} is a file system in memory: to keep the {what} there saves none")
    elif not direct:
        lines.append(f"{folder} has no direct transfers (O_DIRECT): the {what} goes through the page cache, in memory")
    return tuple(lines)


def _in_memory(folder: Path) -> bool:
    """Return True if a folder is known to be on a file system in memory."""
    device = folder.stat().st_dev
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    place = f"{os.major(device)}:{os.minor(device)}"
    # proc(5): the third field is the device, and the type follows a hyphen after a varying number of fields.
    return any(
        fields[2] == place and fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
        for fields in map(str.split, mounts)
        if "-" in fields[:-1]
    )
