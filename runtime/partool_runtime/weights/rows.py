"""Which rows of a parameter this rank holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from partool.layout.parameters import parameters
from partool.spec.model import ModelConfig
from partool_runtime.torch_internals import local


def whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a model, whichever pipeline rank holds it."""
    return {info.name: info.shape for info in parameters(config)}


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, sharing memory with the parameter."""
    return local(parameter.detach())


def local_rows(parameter: torch.Tensor) -> range:
    """Return the rows (indices of dimension 0) that this rank holds; possibly none.

    Raises NotImplementedError for tensors sharded on another dimension.
    """
    if not isinstance(parameter, DTensor):
        return range(parameter.shape[0])
    rows = range(parameter.shape[0])
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard or placement.dim != 0:
            raise NotImplementedError(f"weights cannot be filled into the placement {placement}")
        rows = split_rows(rows, mesh.get_local_rank(axis), mesh.size(axis))
    return rows


def split_rows(rows: range, rank: int, ranks: int) -> range:
    """Return the rank's part of ``rows`` as ``torch.chunk`` deals them: equal parts, rounded up, the last smaller."""
    each = -(-len(rows) // ranks)
    return rows[min(rank * each, len(rows)) : min((rank + 1) * each, len(rows))]
