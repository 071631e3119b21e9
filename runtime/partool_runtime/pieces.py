"""The blocks of whole parameters that this rank holds; filling, saving, loading and export work block by block.

A parameter is first cut over tensor-parallel ranks (:class:`partool_runtime.placement.Placement`); rows of a rank's
part are sharded over data-parallel ranks (FSDP2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from partool_runtime.placement import Placement, full_placement
from partool_runtime.torch_internals.tensors import local


class TensorBlock(NamedTuple):
    """A block of a whole tensor."""

    tensor: torch.Tensor
    """The values; shares memory with the rank's tensor."""
    offsets: tuple[int, ...]
    """Offsets of the block in the whole tensor."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor-parallel rank's part of a larger tensor; the part may be sharded by rows over data-parallel ranks."""

    tensor: torch.Tensor
    placement: Placement

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.placement.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensor's values."""
        return self.tensor.dtype

    def pieces(self) -> list[TensorBlock]:
        """Return the blocks of the whole tensor that this rank holds."""
        return pieces(self.tensor, self.placement)


@dataclass(frozen=True, slots=True)
class FlatPlaced(Placed):
    """A range of consecutive elements of a rank's part of a larger tensor; ``tensor`` is flat and on no mesh."""

    first: int = 0
    """First element of the range in the rank's part."""

    def pieces(self) -> list[TensorBlock]:
        """See :meth:`Placed.pieces`."""
        shape, blocks, at = self.placement.local_shape, [], 0
        for block in _rectangles(shape, self.first, self.first + self.tensor.numel()):
            sizes = [each.stop - each.start for each in block]
            values = self.tensor.detach()[at : at + prod(sizes)].view(sizes)
            at += prod(sizes)
            for box in self.placement.boxes():
                common = [_common(*both) for both in zip(block, box.local, strict=True)]
                if all(each.start < each.stop for each in common):
                    inside = tuple(_moved(each, -b.start) for each, b in zip(common, block, strict=True))
                    moved = zip(common, box.local, box.offsets, strict=True)
                    offsets = tuple(each.start - b.start + offset for each, b, offset in moved)
                    blocks.append(TensorBlock(values[inside], offsets))
        return blocks


def _rectangles(shape: Sequence[int], first: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Yield, in order, blocks of consecutive elements: together the elements ``first`` to ``stop`` of a tensor."""
    if len(shape) == 1:
        yield (slice(first, stop),)
        return
    row = prod(shape[1:])
    whole_rows = slice(-(-first // row), stop // row)
    if whole_rows.start > whole_rows.stop:  # within one row
        for inner in _rectangles(shape[1:], first % row, stop - first // row * row):
            yield (slice(first // row, first // row + 1), *inner)
        return
    if first % row:
        for inner in _rectangles(shape[1:], first % row, row):
            yield (slice(first // row, first // row + 1), *inner)
    if whole_rows.start < whole_rows.stop:
        yield (whole_rows, *(slice(0, size) for size in shape[1:]))
    if stop % row:
        for inner in _rectangles(shape[1:], 0, stop % row):
            yield (slice(stop // row, stop // row + 1), *inner)


def _common(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _moved(one: slice, by: int) -> slice:
    return slice(one.start + by, one.stop + by)


def in_matrices(first: int, stop: int, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield (number of a matrix, its rows) of rows ``first`` to ``stop`` of matrices stacked row under row.

    Each matrix has ``rows`` rows.
    """
    for number in range(first // rows, -(-stop // rows)):
        yield number, slice(max(first - number * rows, 0), min(stop - number * rows, rows))


Value = torch.Tensor | Placed
"""Type of a value that a checkpoint stores under one name."""


def placed(tensor: torch.Tensor, placement: Placement | None) -> Value:
    """Return ``tensor`` with its place in the whole tensor, or only ``tensor`` if the rank holds the whole tensor."""
    if placement is None or (placement.counts and placement.spans == full_placement(placement.shape).spans):
        return tensor
    return Placed(tensor, placement)


def pieces(tensor: torch.Tensor, placement: Placement | None) -> list[TensorBlock]:
    """Return the blocks of the whole tensor that form this rank's part; ``placement`` None means an uncut tensor.

    Raises RuntimeError where the shape of the part differs from the local shape of ``placement``.
    """
    placement = placement or full_placement(tensor.shape)
    if tensor.numel() == 0 and tuple(tensor.shape) == placement.local_shape:
        return []  # FSDP2 keeps no shape of empty shards
    part, rows = local_part(tensor), local_rows(tensor)
    expected = (len(rows), *placement.local_shape[1:]) if placement.shape else ()
    if tuple(tensor.shape) != placement.local_shape or tuple(part.shape) != expected:
        shapes = f"{list(part.shape)} of {list(tensor.shape)}"
        raise RuntimeError(f"a rank holds {shapes} where its placement gives {list(placement.local_shape)}")
    return [TensorBlock(part[box.local], box.offsets) for box in placement.boxes(rows)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; the part shares the tensor's memory."""
    return local(tensor).detach()  # for a shard in host memory the tensor itself reports the device


def local_rows(tensor: torch.Tensor) -> range:
    """Return the range of rows (indices of dimension 0) that this data-parallel rank holds; the range may be empty.

    Raises NotImplementedError for tensors sharded on another dimension.
    """
    rows = range(tensor.shape[0] if tensor.ndim else 1)
    if not isinstance(tensor, DTensor):
        return rows
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard or placement.dim != 0:
            raise NotImplementedError(f"weights cannot be filled into the placement {placement}")
        rows = split_rows(rows, mesh.get_local_rank(axis), mesh.size(axis))
    return rows


def split_rows(rows: range, rank: int, ranks: int) -> range:
    """Return a rank's part of ``rows``, cut as by ``torch.chunk``: sizes are rounded up, the last may be smaller."""
    each = -(-len(rows) // ranks)
    return rows[min(rank * each, len(rows)) : min((rank + 1) * each, len(rows))]
