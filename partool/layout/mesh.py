"""Convert ranks to coordinates in the mesh and back, and give the rows of a sharded parameter on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first, in the order of the fields of :class:`partool.plan.layout.Mesh`."""


class RowRange(NamedTuple):
    """Range of rows that a rank holds: the first row and one past the last row."""

    start: int
    stop: int


def fill_nodes(ranks: Any, per_node: int) -> Any:
    """Return whether groups of neighbouring ``ranks``, a number or a column, are all ranks of two nodes or more.

    Each node has ``per_node`` ranks, and more than one.
    """
    return (per_node > 1) & (ranks > per_node) & (ranks % per_node == 0)


def coordinates(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a rank in a mesh of these sizes, row-major (the last axis varies fastest)."""
    if not 0 <= rank < _product(sizes):
        raise ValueError(f"rank {rank} is outside a mesh of {_product(sizes)} ranks")
    reversed_coordinates = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        reversed_coordinates.append(coordinate)
    return tuple(reversed(reversed_coordinates))


def rank_of(position: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the rank at the coordinates ``position``; the inverse of :func:`coordinates`."""
    rank = 0
    for coordinate, size in zip(position, sizes, strict=True):
        if not 0 <= coordinate < size:
            raise ValueError(f"coordinate {coordinate} is outside an axis of {size}")
        rank = rank * size + coordinate
    return rank


def group_of(rank: int, axis: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` only along the named axis, in order."""
    index = AXES.index(axis)
    position = list(coordinates(rank, sizes))
    members = []
    for coordinate in range(sizes[index]):
        position[index] = coordinate
        members.append(rank_of(position, sizes))
    return tuple(members)


def ranks_on_a_node(axis: str, sizes: Sequence[int], per_node: int) -> int:
    """Return how many ranks (at least 1) of one group along ``axis`` share a node of ``per_node`` consecutive ranks."""
    index = AXES.index(axis)
    stride = _product(sizes[index + 1 :])
    return max(1, min(sizes[index], per_node // stride))


def all_have_rows(rows: int, ranks: int) -> bool:
    """Return True if :func:`shard_rows` leaves none of the ranks without rows."""
    return -(-rows // ranks) * (ranks - 1) < rows


def shard_rows(rows: int, ranks: int, rank: int) -> RowRange:
    """Return the rows of dimension 0 that a rank holds, as ``torch.chunk`` cuts them.

    Chunks have ``ceil(rows / ranks)`` rows; the last chunks may be smaller or empty. FSDP2 shards in the same way
    (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
    """
    chunk = -(-rows // ranks)
    return RowRange(min(rows, rank * chunk), min(rows, (rank + 1) * chunk))


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
