"""Tensor ranks' parts of parameters without communication, for tests that fill, save and export them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from partool.layout.tensor import Partition, by_name
from partool_runtime.model import AnyDecoder
from partool_runtime.placement import Placement


def placement_of(partition: Partition, rank: int, ranks: int) -> Placement:
    holders = partition.holders(rank, ranks)
    shared = holders if partition.gradients == "summed" and len(holders) > 1 else ()
    return Placement(partition.shape, partition.spans(rank), counts=holders[0] == rank, shared_by=shared)


def localise(model: AnyDecoder, rows: Sequence[Partition], rank: int, ranks: int) -> None:
    """Give a model on the meta device the parameters of one tensor rank."""
    partitions: Mapping[str, Partition] = by_name(rows, [name for name, _ in model.named_parameters()])
    placements = {name: placement_of(partition, rank, ranks) for name, partition in partitions.items()}
    for module_name, module in list(model.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            shape = placements[f"{module_name}.{key}"].local_shape
            setattr(module, key, nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta")))
    model.placements = placements
    model.copies = model.copies | {name for name, placement in placements.items() if not placement.counts}
