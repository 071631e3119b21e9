"""A checksum of frozen weights that is the same in every layout, by which a run knows its base model again."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
import torch.distributed as dist

from partool.layout.parameters import is_frozen
from partool_runtime.hashing import mixed
from partool_runtime.model import AnyDecoder
from partool_runtime.pieces import TensorBlock, pieces

_PRIME = 2**31 - 1
"""Sums are taken modulo a prime, so that a sum over copies can be divided by their number."""
_ELEMENTS = 2**22
"""Number of elements that are hashed at a time."""


@torch.no_grad()
def checksum(model: AnyDecoder, names: Collection[str], group: dist.ProcessGroup | None) -> str:
    """Return a checksum of the parameters ``names`` of the whole model; a collective of the ranks of ``group``.

    Each element of a rank's part is hashed with its column. Hashes are summed over each row and over ranks; several
    ranks may hold a row, so the number of its elements is summed, too. The checksum depends on the types of the
    parameters. ``group`` None means one rank.
    """
    parameters = dict(model.named_parameters())
    digest = hashlib.sha256()
    device = next(iter(parameters.values())).device
    for name, shape in model.whole_shapes().items():
        if name not in names:
            continue
        rows, columns = shape[0] if len(shape) > 1 else 1, shape[-1] if shape else 1
        sums = torch.zeros(2, rows, dtype=torch.int64, device=device)
        if name in parameters:
            for piece in pieces(parameters[name], model.placements.get(name)):
                _add(sums, piece, rows)
        if group is not None:
            dist.all_reduce(sums, group=group)
        hashes, counts = sums.cpu()
        copies = counts // columns
        digest.update(f"{name}\0{list(shape)}\0".encode())
        digest.update(_divided(hashes, copies).numpy().tobytes())
    return digest.hexdigest()


def frozen_of(model: AnyDecoder, patterns: Collection[str]) -> set[str]:
    """Return the names of the whole model's parameters that patterns of frozen parameters match."""
    return {name for name in model.whole_shapes() if is_frozen(name, patterns)}


def _add(sums: torch.Tensor, piece: TensorBlock, rows: int) -> None:
    """Add the hashes of a block's elements, and their number, to those of the whole parameter's rows."""
    values, offsets = piece.tensor, piece.offsets
    values = values.reshape(1, -1) if values.ndim < 2 else values.flatten(1)
    row, column = (offsets[0], offsets[1]) if rows > 1 or len(offsets) > 1 else (0, offsets[0] if offsets else 0)
    step = max(1, _ELEMENTS // max(1, values.shape[1]))
    index = torch.arange(column, column + values.shape[1], dtype=torch.int32, device=values.device)
    keys = mixed(index)
    for first in range(0, len(values), step):
        some = values[first : first + step]
        hashes = mixed(_bits(some) ^ keys).to(torch.int64).bitwise_and_(_PRIME)
        at = slice(row + first, row + first + len(some))
        sums[0, at] += hashes.sum(1) % _PRIME
        sums[1, at] += some.shape[1]


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers as integers of 32 bits; those of float64 are folded."""
    values = values.contiguous()
    if values.dtype == torch.float64:
        wide = values.view(torch.int32)
        return mixed(wide[..., 0::2].clone()) ^ wide[..., 1::2]
    return values.view(torch.int32 if values.itemsize == 4 else torch.int16).to(torch.int32)


def _divided(sums: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """Return sums divided by numbers of copies, modulo the prime."""
    factors = torch.zeros_like(copies)
    for count in sorted(set(copies.tolist())):
        factors[copies == count] = pow(count, -1, _PRIME) if count else 0
    return (sums % _PRIME) * factors % _PRIME
