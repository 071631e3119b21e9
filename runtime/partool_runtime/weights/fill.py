"""Filling a model's parameters from any source, each rank its own rows."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from partool.spec.model import Weights
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.reader import open_folder
from partool_runtime.model import AnyDecoder
from partool_runtime.weights.draw import RowSource, block_rows, dummy_rows, init_rows
from partool_runtime.weights.rows import local_part, local_rows, whole_shapes

_COPY_ELEMENTS = 2**24
"""Elements in flight between a source and a parameter: bounds the memory beside the model."""


def fill(model: AnyDecoder, weights: Weights, *, seed: int) -> None:
    """Fill all parameters from ``weights.source``: ``init`` (from the seed), ``dummy``, ``hf`` or ``checkpoint``.

    The model, or a pipeline rank's part of it, is materialised, plain or sharded by rows over ranks. Collective only
    for ``checkpoint``. Raises ConfigurationError PT620 for a folder that cannot be read, PT621 where names or shapes do
    not match.
    """
    if weights.source == "init":
        fill_from(model, init_rows(model.config, seed))
    elif weights.source == "dummy":
        fill_from(model, dummy_rows(model.config))
    elif weights.source == "hf":
        with open_folder(_path(weights), model.config) as source:
            source.check(whole_shapes(model.config))
            fill_from(model, source.rows)
    else:
        from partool_runtime.weights.from_checkpoint import load_model

        load_model(model, _path(weights))


def _path(weights: Weights) -> Path:
    if weights.path is None:
        message = f"model.weights: the source {weights.source} needs a path"
        raise ConfigurationError("PT620", message, "Set model.weights.path to the folder.")
    return Path(weights.path).expanduser()


@torch.no_grad()
def fill_from(model: torch.nn.Module, source: RowSource) -> None:
    """Copy each rank's rows of every parameter from ``source``, cast to the parameter's type."""
    for name, parameter in model.named_parameters():
        rows, part, shape = local_rows(parameter), local_part(parameter), tuple(parameter.shape)
        if part.shape[0] != len(rows):
            raise RuntimeError(f"{name}: holds {part.shape[0]} rows where its placement gives {len(rows)}")
        if not rows:
            continue
        block = block_rows(shape)
        step = block * max(1, _COPY_ELEMENTS // (block * max(1, math.prod(shape[1:]))))
        # Steps end at multiples of whole blocks, so that no block is drawn twice.
        for first in range(rows.start - rows.start % step, rows.stop, step):
            start, stop = max(first, rows.start), min(first + step, rows.stop)
            part[start - rows.start : stop - rows.start].copy_(source(name, shape, start, stop))
