"""``manifest.json``, whose presence makes a folder a complete checkpoint; and the names of the folders."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from partool_runtime.checkpoint._files import Files, HashedFile, file_digest, new_hash
from partool_runtime.errors import CheckpointError, ConfigurationError
from partool_runtime.optim.types import OptimizerNumbers

MANIFEST = "manifest.json"
METADATA = ".metadata"
VERSION = 1
_STEP = re.compile(r"^step-(\d{8,})$")


class CheckpointExtra(OptimizerNumbers):
    """What training saves beside the tensors, as JSON."""

    step: int
    model: dict[str, object]
    """Fields of the plan's ``ModelConfig``."""
    data: str
    """Fingerprint of the data and their order."""
    optimizer: NotRequired[str]
    """Name of the optimizer; older checkpoints, which lack it, are of AdamW."""
    scaler: dict[str, float | bool]
    """See :meth:`partool_runtime.precision.LossScaler.state`."""
    nonfinite_in_row: int
    """Steps in a row, up to this one, whose gradients were not finite."""
    average: NotRequired[bool]
    """Whether it holds a moving average of the weights; older checkpoints lack it."""
    base: NotRequired[str]
    """Checksum of the frozen weights beside an adapter, which the checkpoint does not hold."""


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The content of a complete checkpoint."""

    step: int
    extra: CheckpointExtra
    files: dict[str, tuple[int, str]]
    """Size in bytes and checksum of every file except the manifest, by file name."""
    torch_version: str = ""
    world_size: int = 1
    version: int = field(default=VERSION)

    def to_bytes(self) -> bytes:
        """Return the content of the file, which holds the manifest and the manifest's checksum."""
        body = asdict(self)
        return json.dumps({"manifest": body, "checksum": _checksum(body)}, indent=1).encode()

    @property
    def size_bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(size for size, _ in self.files.values())


def _checksum(body: dict[str, Any]) -> str:
    digest = new_hash()
    digest.update(json.dumps(body, sort_keys=True).encode())
    return str(digest.hexdigest())


def write_manifest(files: Files, folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest, and sync it and the folder's entries to the disk."""
    stream = HashedFile(files, folder / MANIFEST)
    try:
        stream.write(manifest.to_bytes())
        stream.finish()
    except BaseException:
        stream.abandon()
        raise
    files.sync_folder(folder)


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, oldest first; folders being written or deleted have other names."""
    if not folder.is_dir():
        return []
    matches = (_STEP.match(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in a folder; None if the folder has no checkpoint."""
    return max(steps_in(folder), default=None)


def read_manifest(path: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint's folder.

    Raises ConfigurationError PT610 (missing), PT611 (damaged), PT617 (another version), and CheckpointError if the
    system cannot read it now.
    """
    if not path.is_dir():
        raise ConfigurationError("PT610", f"there is no checkpoint at {path}", _siblings_help(path))
    try:
        document = json.loads((path / MANIFEST).read_bytes())
        body = document["manifest"]
        if document["checksum"] != _checksum(body):
            raise ConfigurationError("PT611", f"{path / MANIFEST} is damaged: its checksum does not match")
        if body["version"] != VERSION:
            raise ConfigurationError(
                "PT617",
                f"{path / MANIFEST} has version {body['version']}; this partool reads version {VERSION}",
                "resume with the partool that wrote it; training does not fall back, as the checkpoint may be intact",
            )
        body["files"] = {str(name): (int(size), str(digest)) for name, (size, digest) in body["files"].items()}
        if strange := [name for name in body["files"] if name in ("", ".", "..") or "/" in name or "\0" in name]:
            raise ConfigurationError("PT611", f"{path / MANIFEST} names {strange[0]!r}, which is no file beside it")
        if METADATA not in body["files"]:
            raise ConfigurationError("PT611", f"{path / MANIFEST} does not name {METADATA}")
        return CheckpointManifest(**body)
    except FileNotFoundError:
        raise ConfigurationError("PT611", f"{path / MANIFEST} is missing: the checkpoint is not complete") from None
    except OSError as error:
        raise _unreadable(path / MANIFEST, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError("PT611", f"{path / MANIFEST} cannot be read: {error}") from error


def _siblings_help(path: Path) -> str:
    steps = steps_in(path.parent)
    return (
        f"checkpoints in {path.parent}: steps {', '.join(map(str, steps))}"
        if steps
        else f"{path.parent} holds no checkpoints"
    )


def check_files(path: Path, manifest: CheckpointManifest, names: Sequence[str], *, content: bool) -> None:
    """Compare the sizes of files with the manifest and, if ``content`` is True, also their checksums.

    Raises ConfigurationError PT611 naming the file, and CheckpointError if the system cannot read a file now.
    """
    for name in names:
        size_bytes, digest = manifest.files[name]
        file = path / name
        try:
            found_bytes = file.stat().st_size
            if found_bytes != size_bytes:
                raise ConfigurationError("PT611", f"{file} is damaged: {found_bytes} bytes instead of {size_bytes}")
            if content and file_digest(file) != digest:
                raise ConfigurationError("PT611", f"{file} is damaged: its checksum does not match the manifest's")
        except FileNotFoundError:
            raise ConfigurationError("PT611", f"{file} is missing") from None
        except OSError as error:
            raise _unreadable(file, error) from error


def is_intact(path: Path, *, content: bool) -> bool:
    """Return True if a folder is a complete checkpoint; if ``content`` is True, every byte is checked."""
    try:
        manifest = read_manifest(path)
        check_files(path, manifest, list(manifest.files), content=content)
    except (ConfigurationError, CheckpointError):
        return False
    return True


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    """Return the error about a file that the system does not read now, which proves no damage: a file server fails."""
    return CheckpointError(f"{file} cannot be read: {error.strerror}")
