"""Messages between ranks about checkpoints, as JSON: reading one never executes code from another rank.

Plain values are encoded as JSON values, everything else as an object with one key, which names the kind of value. Only
the classes listed here are ever created.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from partool_runtime.checkpoint._manifest import CheckpointManifest
from partool_runtime.torch_internals.tensors import StorageInfo

_CLASSES: tuple[type, ...] = (
    Metadata, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, MetadataIndex, StorageMeta, SavePlan,
    WriteItem, TensorWriteData, WriteResult, StorageInfo, CheckpointManifest,
)  # fmt: skip
_BY_NAME = {each.__name__: each for each in _CLASSES}
_FIELDS = {each: [field.name for field in dataclasses.fields(each)] for each in _CLASSES}
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def encode(value: Any) -> bytes:
    """Return the message for a value; raises TypeError for a value that messages cannot hold."""
    return json.dumps(_encoded(value), separators=(",", ":")).encode()


def decode(message: bytes) -> Any:
    """Return the value of a message; raises ValueError for a message that :func:`encode` did not write."""
    try:
        return _decoded(json.loads(message))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"a rank sent an invalid message: {error}") from error


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    if isinstance(value, _CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, WriteItemType):
        return {"write": value.value}
    if type(value) in _FIELDS:
        return {type(value).__name__: [_encoded(getattr(value, name)) for name in _FIELDS[type(value)]]}
    raise TypeError(f"{type(value).__name__} is not sent between ranks")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _OTHERS:
        return _OTHERS[kind](content)
    of = _BY_NAME[kind]
    return of(**dict(zip(_FIELDS[of], map(_decoded, content), strict=True)))


def _constant(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _CONSTANTS):
        raise ValueError(f"torch.{name} is not sent between ranks")
    return value


_OTHERS: dict[str, Callable[[Any], Any]] = {
    "size": torch.Size,
    "tuple": lambda content: tuple(map(_decoded, content)),
    "dict": lambda content: {_decoded(key): _decoded(item) for key, item in content},
    "torch": _constant,
    "write": WriteItemType,
}
