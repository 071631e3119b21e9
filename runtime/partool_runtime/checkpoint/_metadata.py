"""``.metadata`` of torch's distributed checkpoints, read without executing it.

torch writes the description of a checkpoint as a pickle and reads the pickle with ``pickle.load``, which executes any
code that the pickle contains. Here the pickle is read as data (:mod:`._pickled`), from which the description is
rebuilt; only listed globals and fields are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from partool_runtime.checkpoint._pickled import MEMBERS, GlobalName, Pairs, PickledCall, PickleError, read
from partool_runtime.torch_internals.tensors import StorageInfo

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
            "StorageMeta", "_MEM_FORMAT_ENCODING")  # fmt: skip
_TYPES = {
    GlobalName("torch", str(each).removeprefix("torch.")): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}
_SIZE, _LAYOUT = GlobalName("torch", "Size"), GlobalName("torch.serialization", "_get_layout")
_STORAGE = GlobalName(filesystem.__name__, "_StorageInfo")
ALLOWED = frozenset({*(GlobalName(_METADATA, name) for name in _CLASSES), *_TYPES, _SIZE, _LAYOUT, _STORAGE, *MEMBERS})
"""All globals (module and name) to which the pickle of a checkpoint of tensors may refer."""
_LARGEST = 2**62
T = TypeVar("T")


def read_metadata(data: bytes, files: Mapping[str, int]) -> Metadata:
    """Return the description in the bytes of ``.metadata``; ``files`` are the checkpoint's files with their sizes.

    Raises :class:`PickleError` for anything but tensors within these files; no code from the data is ever called.
    """
    fields = _fields(read(data, ALLOWED), "Metadata")
    storage = {_index(index): _storage(info, files) for index, info in _pairs(fields, "storage_data")}
    room_bytes, blocks = sum(files.values()), len(storage)
    tensors = {}
    for name, entry in _pairs(fields, "state_dict_metadata"):
        tensors[_is(name, str)] = _tensor(entry, room_bytes, blocks)
        blocks -= len(tensors[name].chunks)
        if any(MetadataIndex(name, chunk.offsets) not in storage for chunk in tensors[name].chunks):
            raise PickleError("a tensor has blocks without a place")
    if fields.get("planner_data") is not None:
        raise PickleError("it describes more than tensors")
    version = fields.get("version")
    return Metadata(dict(tensors), None, storage, StorageMeta(), None if version is None else _is(version, str))


def _is(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise PickleError(f"there is {type(value).__name__} in the place of {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if not 0 <= _is(value, int) <= _LARGEST:
        raise PickleError(f"{value} is no size")
    return int(value)


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the fields of a pickled object, which must be of the class ``name``."""
    if (
        not isinstance(value, PickledCall)
        or value.name not in (GlobalName(_METADATA, name), _STORAGE)
        or value.arguments
    ):
        raise PickleError(f"a required {name} is missing")
    if value.name.name != name:
        raise PickleError(f"there is {value.name.name} in the place of {name}")
    return {_is(key, str): item for key, item in _is(value.state, Pairs).items}


def _pairs(fields: dict[str, Any], name: str) -> list[tuple[Any, Any]]:
    return _is(fields.get(name), Pairs).items


def _size(value: Any) -> torch.Size:
    if not isinstance(value, PickledCall) or value.name != _SIZE or value.state is not None or len(value.arguments) > 1:
        raise PickleError("a required size is missing")
    return torch.Size([_count(each) for each in _is(value.arguments[0] if value.arguments else (), tuple)])


def _tensor(value: Any, room_bytes: int, most: int) -> TensorStorageMetadata:
    """Return the description of a tensor; raises PickleError if the tensor has more than ``most`` blocks."""
    fields = _fields(value, "TensorStorageMetadata")
    dtype, size = _dtype(fields.get("properties")), _size(fields.get("size"))
    if math.prod(size) * dtype.itemsize > room_bytes:
        raise PickleError(f"a tensor of {list(size)} has no room in files of {room_bytes:,} bytes")
    described = _is(fields.get("chunks"), list)
    if len(described) > most:
        raise PickleError("a tensor has blocks without a place")
    chunks = []
    for chunk in described:
        chunk_fields = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_size(chunk_fields.get("offsets")), _size(chunk_fields.get("sizes"))))
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _dtype(value: Any) -> torch.dtype:
    """Return the dtype in a tensor's properties."""
    if not isinstance(value, PickledCall) or value.name != GlobalName(_METADATA, "TensorProperties") or value.arguments:
        raise PickleError("required TensorProperties are missing")
    state = _is(value.state, tuple)
    if not state or not isinstance(state[0], GlobalName) or state[0] not in _TYPES:
        raise PickleError("a tensor has no type")
    return _TYPES[state[0]]


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _is(fields.get("fqn"), str),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _storage(value: Any, files: Mapping[str, int]) -> StorageInfo:
    fields = _fields(value, "_StorageInfo")
    name = _is(fields.get("relative_path"), str)
    offset, length = _count(fields.get("offset")), _count(fields.get("length"))
    if name not in files or offset + length > files[name]:
        raise PickleError(f"a tensor lies in {name[:200]!r}, outside the files of the checkpoint")
    if fields.get("transform_descriptors"):
        raise PickleError("a tensor is packed in a way that partool does not write")
    return StorageInfo(name, offset, length)
