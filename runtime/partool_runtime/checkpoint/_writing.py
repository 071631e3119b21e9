"""Write one checkpoint: all ranks write and sync files in ``step-N.tmp``, then rank 0 renames this folder."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from partool_runtime.checkpoint import _folders
from partool_runtime.checkpoint._agreement import SavingRanks
from partool_runtime.checkpoint._files import Files, HashedFileSystem
from partool_runtime.checkpoint._manifest import (
    CheckpointExtra,
    CheckpointManifest,
    check_files,
    step_folder,
    write_manifest,
)
from partool_runtime.checkpoint._plan import StateBlocks, WritePlan
from partool_runtime.errors import CheckpointError, ConfigurationError
from partool_runtime.torch_internals.checkpoint_items import write_blocks

_OVERHEAD_BYTES = 1 << 20
"""Bytes allowed for headers, metadata and manifest when checking for free space."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One checkpoint to write."""

    folder: Path
    step: int
    extra: CheckpointExtra
    plan: WritePlan
    blocks: StateBlocks
    """The blocks of tensors that this rank writes."""
    keep: int
    prune: bool = True
    """True if all but the ``keep`` newest checkpoints are deleted."""
    proven: int | None = None
    """Step of a checkpoint that is kept in any case."""
    best: Callable[[], Collection[int]] = tuple
    """Returns further steps that are kept, of the checkpoints that are complete; called on the first rank."""


class _Writer(FileSystemWriter):
    """DCP's writer to a hashed file system."""

    def __init__(self, path: Path, file_system: HashedFileSystem) -> None:
        super().__init__(path, sync_files=False)  # HashedFileSystem syncs the files
        self.fs = file_system
        self.folder = path

    def storage_meta(self) -> None:
        """Omit DCP's description of the storage, which holds a path and a random id."""


Part = tuple[list[WriteResult], dict[str, tuple[int, str]]]
"""A rank's results: the items that it wrote, and sizes and checksums of its files by file name."""


def write(job: WriteJob, ranks: SavingRanks, files: Files) -> int:
    """Write a checkpoint, delete checkpoints beyond the number to keep, and return the new checkpoint's size in bytes.

    A collective, which fails on all ranks or on none. On failure the kept older checkpoints stay
    unchanged, and no half-written files remain.
    Raises ConfigurationError PT613 if the space does not suffice, CheckpointError for any other failure.
    """
    target = step_folder(job.folder, job.step)
    temporary = target.with_name(target.name + _folders.TEMPORARY)
    file_system = HashedFileSystem(files)
    writer = _Writer(temporary, file_system)
    explain = _Explain(job, files)
    try:
        ranks.on_first(lambda: explain(lambda: _prepare(job, temporary, files)))
        parts = ranks.agree(lambda: explain(lambda: _write_own(job, temporary, writer, file_system)))
        return ranks.on_first(lambda: explain(lambda: _publish(job, writer, file_system, parts, files)))
    except Exception:
        if ranks.rank == 0:
            _discard(temporary, files)
        raise


def _prepare(job: WriteJob, temporary: Path, files: Files) -> None:
    if job.prune and job.proven is not None:  # delete the checkpoints that were kept until a later step was proven
        _folders.retain(job.folder, job.keep, files, also=job.best(), until=job.proven)
    free_bytes = files.free_bytes(job.folder)
    if free_bytes is not None and free_bytes < job.plan.total_bytes + _OVERHEAD_BYTES:
        raise OSError(errno.ENOSPC, "not enough free space")
    files.remove_folder(temporary)
    files.make_folder(temporary)


def _write_own(job: WriteJob, temporary: Path, writer: _Writer, file_system: HashedFileSystem) -> Part:
    file_system.mkdir(temporary)
    return write_blocks(writer, job.plan.items, job.blocks.take), file_system.written


def _publish(job: WriteJob, writer: _Writer, file_system: HashedFileSystem, parts: list[Part], files: Files) -> int:
    temporary = writer.folder
    writer.finish(job.plan.metadata, [results for results, _ in parts])
    written = dict(file_system.written)
    for _, part in parts:
        written.update(part)
    manifest = CheckpointManifest(job.step, job.extra, written, torch.__version__, len(parts))
    try:
        check_files(temporary, manifest, list(written), content=False)
    except ConfigurationError as error:
        raise CheckpointError(f"{job.folder} must be on a file system that all ranks share: {error.message}") from error
    write_manifest(files, temporary, manifest)
    _folders.publish(job.folder, job.step, temporary, files)
    if job.prune:
        _folders.retain(job.folder, job.keep, files, also=[job.proven, *job.best()])
    return manifest.size_bytes


def _discard(temporary: Path, files: Files) -> None:
    try:
        files.remove_folder(temporary)
    except OSError:
        pass  # the next start removes the folder; the error that led here matters more


T = TypeVar("T")


class _Explain:
    """Turns file system errors into partool's errors, with the numbers of bytes."""

    def __init__(self, job: WriteJob, files: Files) -> None:
        self._job = job
        self._files = files

    def __call__(self, action: Callable[[], T]) -> T:
        """Run ``action``; a full disk becomes ConfigurationError PT613, another OSError CheckpointError."""
        try:
            return action()
        except OSError as error:
            where = f"checkpoint of step {self._job.step} in {self._job.folder}"
            if error.errno not in _FULL:
                raise CheckpointError(f"{where} cannot be written: {error}") from error
            free_bytes = self._files.free_bytes(self._job.folder)
            free = "unknown bytes" if free_bytes is None else f"{free_bytes:,} bytes"
            total = self._job.plan.total_bytes
            needed = f"{total + _OVERHEAD_BYTES:,} bytes ({total:,} of state, {_OVERHEAD_BYTES:,} to describe it)"
            raise ConfigurationError(
                "PT613",
                f"{where} needs {needed} and cannot be written: {error.strerror} ({free} free)",
                "free some space or set checkpoint.dir to a larger disk, then go on with --resume; earlier checkpoints "
                "are untouched",
            ) from error
