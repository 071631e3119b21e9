"""What is computed a second time, in a backward pass, and may therefore do less.

The state is one per process and not per thread: on a GPU backward passes run on a thread of their own.
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
    """Say that a layer is computed again for what its backward pass needs: nobody reads its result."""
    before, _State.layer = _State.layer, True
    try:
        yield
    finally:
        _State.layer = before


def is_recomputing_layer() -> bool:
    """Tell whether a layer is computed again."""
    return _State.layer


@contextmanager
def tile(*, unread: bool = False) -> Iterator[None]:
    """Say that a tile is computed, of which nothing is to be kept; ``unread``: nor does anybody read its result."""
    before, (_State.tile, _State.unread) = (_State.tile, _State.unread), (True, unread)
    try:
        yield
    finally:
        _State.tile, _State.unread = before


def is_tile() -> bool:
    """Tell whether a tile is computed."""
    return _State.tile


def is_unread() -> bool:
    """Tell whether what is computed is for its graph alone, so that ranks need not sum their parts of the result."""
    return _State.unread
