"""A checksum of frozen weights that is the same in every layout, by which a run knows its base model again."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from partool.layout.parameters import is_frozen
from partool.layout.quantised import CODES, quantised_names, stored_tensors
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
    parameters; of matrices in few bits it covers codes and scales. ``group`` None means one rank.
    """
    parameters = dict(model.named_parameters())
    quantised = quantised_names(model.config, names)
    digest = hashlib.sha256()
    device = next(iter(parameters.values())).device
    for name, full_shape in model.whole_shapes().items():
        if name not in names:
            continue
        shapes: dict[str, tuple[int, ...]] = {name: full_shape}
        parts: dict[str, list[TensorBlock]] = {}
        if name in quantised:
            shapes, parts = _of_few_bits(model, name, full_shape)
        elif name in parameters:
            parts = {name: pieces(parameters[name], model.placements.get(name))}
        for each, shape in shapes.items():
            sums = _sums(parts.get(each, []), shape, device)
            if group is not None:
                dist.all_reduce(sums, group=group)
            hashes, counts = sums.cpu()
            copies = counts // (shape[-1] if shape else 1)
            digest.update(f"{each}\0{list(shape)}\0".encode())
            digest.update(_divided(hashes, copies).numpy().tobytes())
    return digest.hexdigest()


def _of_few_bits(
    model: AnyDecoder, name: str, shape: tuple[int, ...]
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[TensorBlock]]]:
    """Return the shapes of a matrix's codes and scales, and the blocks of them that this rank holds."""
    adapter, projection = model.config.adapter, name.rpartition(".")[0]
    assert adapter is not None, "few bits without an adapter"
    tensors = {each.name: each.shape for each in stored_tensors(adapter, shape)} | {CODES: shape}
    shapes = {f"{projection}.{each}": size for each, size in tensors.items()}
    if name not in model.stored:
        return shapes, {}
    module, matrix = model.stored[name]
    return shapes, {f"{projection}.{part.name}": pieces(part.values, part.placement) for part in matrix.parts(module)}


def _sums(blocks: Sequence[TensorBlock], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the sums of the hashes of each row's elements, and the numbers of elements."""
    rows = shape[0] if len(shape) > 1 else 1
    sums = torch.zeros(2, rows, dtype=torch.int64, device=device)
    for block in blocks:
        _add(sums, block, rows)
    return sums


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
    if values.itemsize == 1:
        return values.to(torch.int32)
    return values.view(torch.int32 if values.itemsize == 4 else torch.int16).to(torch.int32)


def _divided(sums: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """Return sums divided by numbers of copies, modulo the prime."""
    factors = torch.zeros_like(copies)
    for count in sorted(set(copies.tolist())):
        factors[copies == count] = pow(count, -1, _PRIME) if count else 0
    return (sums % _PRIME) * factors % _PRIME
