"""Describes layers so that two layers that do the same have equal descriptions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

_NUMBERS = frozenset({"number", "layer", "layer_idx", "layer_id"})
"""Attributes that hold a layer's number in the model."""
_DEPTH = 6
"""Most levels of objects within objects that are described, below a module."""


def kind_of(module: nn.Module) -> object:
    """Return a description of a module, its parameters' shapes and its settings, that can be a key."""
    return (
        type(module).__qualname__,
        tuple((name, _tensor(each)) for name, each in module.named_parameters(recurse=False)),
        tuple((name, _tensor(each)) for name, each in module.named_buffers(recurse=False)),
        _fields(module, _DEPTH),
        tuple((name, kind_of(child)) for name, child in module.named_children()),
    )


def description(value: Any, depth: int = _DEPTH) -> object:
    """Return a description of a value: modules within it by their class, tensors by shape and type.

    Objects that nothing here can look into are described by their class.
    """
    if isinstance(value, str | int | float | bool | None | torch.dtype | torch.device):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, ProcessGroup):
        return id(value)
    if depth == 0 or isinstance(value, nn.Module):
        return type(value).__qualname__
    if isinstance(value, partial):
        return tuple(description(each, depth - 1) for each in (value.func, value.args, value.keywords))
    if isinstance(value, list | tuple):
        return type(value).__qualname__, tuple(description(each, depth - 1) for each in value)
    if isinstance(value, set | frozenset):
        return type(value).__qualname__, tuple(sorted(map(repr, value)))
    if isinstance(value, dict):
        return tuple((str(name), description(each, depth - 1)) for name, each in value.items() if name not in _NUMBERS)
    bound = description(getattr(value, "__self__", None), depth - 1), _cells(value, depth - 1)
    return getattr(value, "__qualname__", type(value).__qualname__), bound, _fields(value, depth - 1)


def _tensor(tensor: torch.Tensor) -> object:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, type(tensor).__qualname__


def _cells(function: Any, depth: int) -> tuple[object, ...]:
    """Describe the variables that a function has from around it."""
    contents = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            contents.append(description(cell.cell_contents, depth))
        except ValueError:  # a variable that has no value yet
            contents.append("empty")
    return tuple(contents)


def _fields(value: object, depth: int) -> tuple[tuple[str, object], ...]:
    """Describe an object's attributes, but for private ones: torch numbers objects there."""
    if isinstance(value, type):
        return ()
    slots = [name for each in type(value).__mro__ for name in _slots(each) if hasattr(value, name)]
    attributes = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
    public = sorted(name for name in attributes if name not in _NUMBERS and not name.startswith("_"))
    return tuple((name, description(attributes[name], depth)) for name in public)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
