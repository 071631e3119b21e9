"""Flags that tell code whether it is being recomputed for a backward pass, so that it may skip work.

The state is stored per process and not per thread: on a GPU backward passes run on a separate thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class _State:
    layer = False
    tile = False
    unread = False


@contextmanager
def recomputing_layer() -> Iterator[None]:
    """Mark that a layer is recomputed for its backward pass, so that the layer's output is not read."""
    before, _State.layer = _State.layer, True
    try:
        yield
    finally:
        _State.layer = before


def is_recomputing_layer() -> bool:
    """Return whether a layer is being recomputed."""
    return _State.layer


@contextmanager
def tile(*, unread: bool = False) -> Iterator[None]:
    """Mark that a tile is computed without keeping its tensors; ``unread`` means that the tile's result is not read."""
    before, (_State.tile, _State.unread) = (_State.tile, _State.unread), (True, unread)
    try:
        yield
    finally:
        _State.tile, _State.unread = before


def is_tile() -> bool:
    """Return whether a tile is being computed."""
    return _State.tile


def is_unread() -> bool:
    """Return whether a result is computed only for its autograd graph; ranks need not sum such a result."""
    return _State.unread
