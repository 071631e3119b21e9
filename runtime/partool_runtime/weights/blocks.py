"""Copying blocks of a source into the parts of parameters that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from partool_runtime.model import AnyDecoder
from partool_runtime.pieces import TensorBlock, pieces
from partool_runtime.weights.draw import BlockSource, block_rows
from partool_runtime.weights.quantise import fill_matrix

_COPY_ELEMENTS = 2**20
"""Maximum number of elements copied at a time from a source; limits the memory needed in addition to the model."""


@torch.no_grad()
def fill_from(
    model: AnyDecoder,
    source: BlockSource,
    masters: Mapping[str, torch.Tensor] | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Copy this rank's blocks of the ``wanted`` parameters from ``source``.

    Values are cast to the type of the parameter or its master, or quantised where the parameter is stored so.
    """
    fill_stored(model, source, wanted)
    shapes = model.whole_shapes() if model.stored else None
    for name, parameter in targets(model, masters).items():
        if not wanted(name) or (shapes is not None and name not in shapes):
            continue
        placement = model.placements.get(name)
        shape = tuple(parameter.shape) if placement is None else placement.shape
        for piece in pieces(parameter, placement):
            _fill_piece(piece, name, shape, source)


@torch.no_grad()
def fill_stored(model: AnyDecoder, source: BlockSource, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Quantise this rank's parts of the ``wanted`` matrices that are stored in few bits.

    Raises ConfigurationError PT622 for a matrix with a NaN or an infinity.
    """
    for name, (module, matrix) in model.stored.items():
        if wanted(name):
            fill_matrix(name, module, matrix, source)


def targets(model: AnyDecoder, masters: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return the tensors to fill, by parameter name: masters where they exist, otherwise the parameters."""
    return {name: (masters or {}).get(name, parameter) for name, parameter in model.named_parameters()}


def _fill_piece(piece: TensorBlock, name: str, shape: tuple[int, ...], source: BlockSource) -> None:
    """Copy a block of a parameter, whose unsharded shape is ``shape``, a limited number of rows at a time."""
    target, offsets = piece.tensor, piece.offsets
    if not shape:
        target.copy_(source(name, shape, (), ()))
        return
    block = block_rows(shape)
    step = block * max(1, _COPY_ELEMENTS // (block * max(1, math.prod(shape[1:]))))
    first_row, last_row = offsets[0], offsets[0] + target.shape[0]
    # Steps end at multiples of drawn blocks, so that no block is drawn twice.
    for first in range(first_row - first_row % step, last_row, step):
        start, stop = max(first, first_row), min(first + step, last_row)
        sizes = (stop - start, *target.shape[1:])
        target[start - first_row : stop - first_row].copy_(source(name, shape, (start, *offsets[1:]), sizes))
