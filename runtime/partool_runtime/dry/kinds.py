"""Describes layers so that two layers that do the same have equal descriptions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

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


def _tensor(tensor: torch.Tensor) -> object:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, type(tensor).__qualname__


def _value(value: Any, depth: int) -> object:
    if isinstance(value, str | int | float | bool | None | torch.dtype | torch.device):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if depth == 0 or isinstance(value, nn.Module):
        return type(value).__qualname__
    if isinstance(value, partial):
        return tuple(_value(each, depth - 1) for each in (value.func, value.args, value.keywords))
    if isinstance(value, list | tuple):
        return type(value).__qualname__, tuple(_value(each, depth - 1) for each in value)
    if isinstance(value, dict):
        return tuple((str(name), _value(each, depth - 1)) for name, each in value.items() if name not in _NUMBERS)
    closure = getattr(value, "__closure__", None) or ()
    cells = tuple(_value(cell.cell_contents, depth - 1) for cell in closure)
    return getattr(value, "__qualname__", type(value).__qualname__), cells, _fields(value, depth - 1)


def _fields(value: object, depth: int) -> tuple[tuple[str, object], ...]:
    """Describe an object's attributes, but for private ones: torch numbers objects there."""
    own = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    told = sorted(name for name in own if name not in _NUMBERS and not name.startswith("_"))
    return tuple((name, _value(own[name], depth)) for name in told)
