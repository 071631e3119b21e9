"""Filling a model's parameters from any source, each rank its own blocks."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from partool.spec.model import Weights
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.model import HfPart
from partool_runtime.hf.reader import open_folder
from partool_runtime.model import AnyDecoder
from partool_runtime.pieces import Piece, pieces
from partool_runtime.weights.draw import BlockSource, block_rows, dummy_source, init_source

_COPY_ELEMENTS = 2**20
"""Elements in flight between a source and a parameter: bounds the memory beside the model."""


def fill(model: AnyDecoder, weights: Weights, *, seed: int) -> None:
    """Fill all parameters from ``weights.source``: ``init`` (from the seed), ``dummy``, ``hf`` or ``checkpoint``.

    The model, or a pipeline rank's part of it, is materialised: plain, cut over tensor ranks, sharded by rows over
    data-parallel ranks. Collective only for ``checkpoint``. Raises ConfigurationError PT620 for a folder that cannot be
    read, PT621 where names or shapes do not match.
    """
    if weights.source in ("init", "dummy"):
        drawn = init_source(model.config, seed) if weights.source == "init" else dummy_source(model.config)
        fill_from(model, model.first_values(drawn) if isinstance(model, HfPart) else drawn)
    elif weights.source == "hf":
        path = _path(weights)
        with model.open_weights(path) if isinstance(model, HfPart) else open_folder(path, model.config) as source:
            source.check(model.whole_shapes())
            fill_from(model, source.block)
    else:
        from partool_runtime.weights.from_checkpoint import load_model

        load_model(model, _path(weights))


def _path(weights: Weights) -> Path:
    if weights.path is None:
        message = f"model.weights: the source {weights.source} needs a path"
        raise ConfigurationError("PT620", message, "Set model.weights.path to the folder.")
    return Path(weights.path).expanduser()


@torch.no_grad()
def fill_from(model: AnyDecoder, source: BlockSource) -> None:
    """Copy each rank's blocks of every parameter from ``source``, cast to the parameter's type."""
    for name, parameter in model.named_parameters():
        placement = model.placements.get(name)
        shape = tuple(parameter.shape) if placement is None else placement.shape
        for piece in pieces(parameter, placement):
            _fill_piece(piece, name, shape, source)


def _fill_piece(piece: Piece, name: str, shape: tuple[int, ...], source: BlockSource) -> None:
    """Copy a block of a parameter of the whole shape ``shape``, so many rows at a time."""
    target, offsets = piece.tensor, piece.offsets
    if not shape:
        target.copy_(source(name, shape, (), ()))
        return
    block = block_rows(shape)
    step = block * max(1, _COPY_ELEMENTS // (block * max(1, math.prod(shape[1:]))))
    first_row, last_row = offsets[0], offsets[0] + target.shape[0]
    # Steps end at multiples of whole blocks, so that no block is drawn twice.
    for first in range(first_row - first_row % step, last_row, step):
        start, stop = max(first, first_row), min(first + step, last_row)
        sizes = (stop - start, *target.shape[1:])
        target[start - first_row : stop - first_row].copy_(source(name, shape, (start, *offsets[1:]), sizes))
