"""Read a checkpoint into tensors of any layout, after verifying every byte."""

from __future__ import annotations

import dataclasses
import io
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from partool_runtime.checkpoint._agreement import SavingRanks
from partool_runtime.checkpoint._manifest import (
    METADATA,
    CheckpointExtra,
    CheckpointManifest,
    check_files,
    is_intact,
    read_manifest,
    step_folder,
    steps_in,
)
from partool_runtime.checkpoint._metadata import read_metadata
from partool_runtime.checkpoint._pickled import PickleError
from partool_runtime.checkpoint._plan import State, StatePart, blocks_of, holds_any
from partool_runtime.errors import CheckpointError, ConfigurationError
from partool_runtime.pieces import Placed, Value

Entries = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of tensors, by name."""
_MODEL = "model."
"""Prefix of parameter names; other tensors belong to the optimizer."""
_NAMES_SHOWN = 5
_REFUSED = "partool writes nothing of the kind: find out who wrote it; nothing in it has been run"


def tensor_shapes(path: Path) -> Entries:
    """Return the shape and type of every tensor of a checkpoint's folder; raises ConfigurationError PT610, PT611."""
    return _shapes(_checked_metadata(path, read_manifest(path)))


def load_folder(
    path: Path,
    state: State,
    ranks: SavingRanks | None = None,
    run: str | None = "last",
    *,
    cast: bool = False,
    accept: Callable[[CheckpointExtra], None] | None = None,
) -> CheckpointExtra:
    """Fill ``state`` in place from a checkpoint's folder and return its ``extra``; a collective if ``ranks`` is given.

    ``run`` names the run in errors, which with None give no advice about older checkpoints. With ``cast``, all values
    may have been saved in other types than in ``state``; without ``cast``, only moments may. ``accept`` is called with
    the checkpoint's ``extra`` before anything is filled, and raises an error if the checkpoint must not be loaded.

    The ranks may hold different names. Together they may leave out whole groups of names (a group is the text before
    the first dot), but not parts of a group.
    Raises ConfigurationError PT610 (missing), PT611 (damaged, names the file), PT612 (of another model).
    """
    ranks = ranks or SavingRanks(0, 1, timeout_s=0)
    try:
        manifest = _checked_manifest(path, ranks)
    except ConfigurationError as error:
        raise error if run is None else _with_older(path, error, ranks, run) from error
    if accept is not None:
        accept(manifest.extra)  # ``extra`` is the same on all ranks
    metadata = ranks.on_first(lambda: _checked_metadata(path, manifest))
    saved = _shapes(metadata)
    local_entries = {
        name: (tuple(value.shape), _type(name, value, saved, cast))
        for name, value in state.items()
        if holds_any(value)  # FSDP2 skips empty shards: they have the computation's type
    }
    entries = {name: entry for part in ranks.gather(local_entries) for name, entry in part.items()}
    ranks.agree(lambda: _check_same_model(path, saved, entries))
    ranks.agree(lambda: _read(path, metadata, state))
    return manifest.extra


class VerifiedFolder:
    """A checkpoint's folder whose every byte was verified, from which a rank reads single tensors."""

    def __init__(self, path: Path, ranks: SavingRanks | None = None) -> None:
        """Verify the folder; a collective if ``ranks`` is given. Raises ConfigurationError PT610, PT611, PT685."""
        self._path = path
        self._metadata = _checked_metadata(path, _checked_manifest(path, ranks or SavingRanks(0, 1, timeout_s=0)))
        self._entries = _shapes(self._metadata)

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU, in the type in which it was saved; no collective."""
        shape, dtype = self._entries[name]
        tensor = torch.empty(shape, dtype=dtype)
        _read(self._path, self._metadata, {name: tensor})
        return tensor


def _type(name: str, value: Value, saved: Entries, cast: bool) -> torch.dtype:
    """Return the type that the saved value must have: the saved type if it may be converted, else the value's type."""
    if name not in saved:
        return value.dtype
    saved_type = saved[name][1]
    # A run may continue with wider or narrower moments than before; another type of the weights would change the model.
    moment = not name.startswith(_MODEL) and saved_type.is_floating_point and value.dtype.is_floating_point
    return saved_type if cast or moment else value.dtype


def _checked_manifest(path: Path, ranks: SavingRanks) -> CheckpointManifest:
    """Return the manifest after every byte of the checkpoint was read and verified once; the ranks share the work."""
    manifest = ranks.on_first(lambda: read_manifest(path))
    names = sorted(manifest.files)
    ranks.agree(lambda: check_files(path, manifest, names, content=False))
    ranks.agree(lambda: check_files(path, manifest, names[ranks.rank :: ranks.world_size], content=True))
    return manifest


def _checked_metadata(path: Path, manifest: CheckpointManifest) -> Metadata:
    """Read DCP's metadata, which must match the manifest; raises ConfigurationError PT611, PT685."""
    check_files(path, manifest, [METADATA], content=True)
    try:
        return read_metadata(
            (path / METADATA).read_bytes(), {name: size_bytes for name, (size_bytes, _) in manifest.files.items()}
        )
    except OSError as error:
        raise CheckpointError(f"{path / METADATA} cannot be read: {error.strerror}") from error
    except PickleError as error:
        raise ConfigurationError("PT685", f"{path / METADATA} is refused: {error}", _REFUSED) from error


def _shapes(metadata: Metadata) -> Entries:
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _with_older(path: Path, error: ConfigurationError, ranks: SavingRanks, run: str) -> ConfigurationError:
    """Return ``error`` with advice on how to continue from the newest older checkpoint that is intact."""
    folder = path.parent
    damaged = next((step for step in steps_in(folder) if step_folder(folder, step) == path), None)
    if damaged is None:
        return error
    older = ranks.on_first(lambda: _newest_intact(folder, damaged))
    if older is None:
        return ConfigurationError(error.code, error.message, f"there is no older intact checkpoint in {folder}")
    command = f"partool launch --resume {shlex.quote(run)} --step {older}"
    return ConfigurationError(error.code, error.message, f"step {older} is intact; to go on from it: {command}")


def _newest_intact(folder: Path, before: int) -> int | None:
    older = (step for step in reversed(steps_in(folder)) if step < before)
    return next((step for step in older if is_intact(step_folder(folder, step), content=True)), None)


def _check_same_model(path: Path, saved: Entries, entries: Entries) -> None:
    """Compare the saved tensors with the tensors that all ranks hold together."""
    groups = {name.partition(".")[0] for name in entries}
    saved = {name: entry for name, entry in saved.items() if name.partition(".")[0] in groups}
    differences = [f"{name} is only in the checkpoint" for name in sorted(saved.keys() - entries.keys())]
    differences += [f"{name} is not in the checkpoint" for name in sorted(entries.keys() - saved.keys())]
    for name in sorted(saved.keys() & entries.keys()):
        if saved[name] != entries[name]:
            differences.append(f"{name} is {_brief(*saved[name])} in the checkpoint and {_brief(*entries[name])} here")
    if differences:
        shown = "; ".join(differences[:_NAMES_SHOWN])
        more = f"; and {len(differences) - _NAMES_SHOWN} more" if len(differences) > _NAMES_SHOWN else ""
        raise ConfigurationError(
            "PT612",
            f"{path} is a checkpoint of another model: {shown}{more}",
            "resume with the model the run was started with",
        )


def _brief(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class _Planner(DefaultLoadPlanner):
    """Finds the tensors that read items fill: whole tensors by name, tensor-parallel blocks by name and offset."""

    def __init__(self, blocks: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = blocks

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor of which a read item fills a part."""
        block = self._blocks.get(index)
        return super().lookup_tensor(index) if block is None else block

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Refuse values that are not tensors, because torch would unpickle them."""
        message = f"{read_item.storage_index.fqn} is no tensor"
        raise ConfigurationError("PT685", message, _REFUSED)


def _read(path: Path, metadata: Metadata, state: State) -> None:
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner, plan = _load_plan(metadata, state)
    try:
        with torch.no_grad():
            reader.read_data(plan, planner).wait()
    except (ConfigurationError, OSError, MemoryError):
        raise
    except Exception as error:  # torch may raise any error for bytes that are not a tensor block
        message = f"{path}: no block of a tensor lies where {METADATA} says ({type(error).__name__})"
        raise ConfigurationError("PT685", message, _REFUSED) from error


def parts_to_load(state: State) -> Iterator[StatePart]:
    """Yield the parts of tensors that this rank reads, from a checkpoint in which each tensor is one block."""
    one_block_each = {
        name: TensorStorageMetadata(
            TensorProperties(value.dtype),
            torch.Size(value.shape),
            [ChunkStorageMetadata(torch.Size([0] * len(value.shape)), torch.Size(value.shape))],
        )
        for name, value in state.items()
    }
    _, plan = _load_plan(Metadata(dict(one_block_each)), state)
    for item in plan.items:
        yield StatePart(item.storage_index.fqn, tuple(item.storage_offsets), tuple(item.lengths))


def _load_plan(metadata: Metadata, state: State) -> tuple[DefaultLoadPlanner, LoadPlan]:
    """Return the planner that finds the tensors to fill, and what this rank reads."""
    parts = {name: blocks_of(name, value) for name, value in state.items() if isinstance(value, Placed)}
    planner = _Planner({index: block for blocks in parts.values() for index, block in blocks.items()})
    tensors = {name: value for name, value in state.items() if not isinstance(value, Placed)}
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    items = [item for name, blocks in parts.items() for item in _read_items(name, metadata, blocks)]
    return planner, dataclasses.replace(plan, items=[*plan.items, *items])


def _read_items(name: str, metadata: Metadata, blocks: Mapping[MetadataIndex, Tensor]) -> list[ReadItem]:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata), name
    chunks = [
        ChunkStorageMetadata(index.offset, block.shape) for index, block in blocks.items() if index.offset is not None
    ]
    return create_read_items_for_chunk_list(name, entry, chunks)
