"""Feed-forward networks that work on tiles of a sequence: where, and what computing them again takes."""

from __future__ import annotations

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts, Mask, TrainingJob
from partool.cost.time.gemm import matmul_s


def in_tiles(job: TrainingJob, layouts: Layouts) -> Mask:
    """Return where networks work on tiles of what a rank holds of a sequence."""
    tile = np.asarray(layouts.mlp_tile_tokens)
    return (tile > 0) & (tile < job.sequence_length / np.asarray(layouts.cp))


def products_s(job: TrainingJob, layouts: Layouts) -> Column:
    """Return the seconds of a dense network's products of one micro-batch, tile by tile, one pass forward."""
    model, inner = job.model, tensor_shares.width(job.model.ffn_hidden, tensor_shares.outer(layouts))
    length = job.sequence_length / np.asarray(layouts.cp)
    tile = np.where(in_tiles(job, layouts), layouts.mlp_tile_tokens, length)
    rows = tile * layouts.micro_batch
    first = matmul_s(job, rows, (1 + model.gated) * inner, model.hidden)
    return length / tile * (first + matmul_s(job, rows, model.hidden, inner))
