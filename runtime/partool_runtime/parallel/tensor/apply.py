"""Replaces a model's matrices by a tensor rank's parts, and sets what exchanges between the ranks' products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from partool.layout.grid import whole_rows
from partool.layout.sequence import tokens
from partool.layout.tensor import Partition, by_name
from partool.plan.types import Plan
from partool.strategies.sequence import ON_GRIDS
from partool_runtime.mesh import Ranks
from partool_runtime.model import AnyDecoder, Decoder, DecoderParts
from partool_runtime.model.decoder import Block
from partool_runtime.parallel.tensor.adapters import share_adapters
from partool_runtime.parallel.tensor.columns import ColumnParallel
from partool_runtime.parallel.tensor.ops import Team
from partool_runtime.parallel.tensor.rows import RowParallel
from partool_runtime.parallel.tensor.sharding import LayerSharding, Sharding, apply_sharding
from partool_runtime.parallel.tensor.symmetric import check_symmetric
from partool_runtime.parallel.tensor.two_dim_apply import two_dim_sharding
from partool_runtime.parallel.tensor.vocabulary import SharedPositions, VocabularyLoss, VocabularyRows
from partool_runtime.placement import Placement
from partool_runtime.precision import COMPUTE_DTYPE


def apply_tensor(model: Decoder | DecoderParts, plan: Plan, ranks: Ranks) -> None:
    """Cut partool's decoder to this rank's share, in place, while it is still on the meta device.

    Every parameter gets the rank's local shape, ``model.placements`` records its place in the whole parameter, and
    ``model.copies`` names parameters whose gradients another rank counts in the gradient norm. With one rank nothing
    changes. Raises ConfigurationError PT647 where products and exchanges cannot be fused through symmetric memory.
    """
    if ranks.tp.size == 1:
        return
    place(model, plan, ranks)
    two_dim = plan.layout.tensor.inner > 1
    if plan.model.adapter is not None and not two_dim:
        share_adapters(model, plan, make_team(plan, ranks))
    apply_sharding(model, two_dim_sharding(plan, ranks) if two_dim else _sharding(model, plan, ranks))
    if not two_dim and (length := make_team(plan, ranks).length) is not None:
        for stage in model.stages.values():
            cast(Any, stage).contexts.length = length


def _of_layer(team: Team, block: Block, plan: Plan, ranks: Ranks) -> Team:
    """Return the team of tensor ranks for a layer; ranks may hold different numbers of tokens in different layers."""
    along_rows = plan.layout.sequence.method in ON_GRIDS and block.attention.layout.axis == "row"
    if team.length is None or not along_rows or plan.model.grid is None:
        return team
    rows = whole_rows(*plan.model.grid, ranks.cp.size)[ranks.cp.place]
    layer_team = replace(team, length=tokens(rows))
    if layer_team.symmetric:
        check_symmetric(layer_team, ranks.device, plan.partition)
    return layer_team


def make_team(plan: Plan, ranks: Ranks) -> Team:
    """Return the team of tensor ranks, with the plan's settings; raises like :func:`apply_tensor`."""
    layout = plan.layout
    team = Team(
        ranks.tensor_group.group_name,
        ranks.tp.place,
        ranks.tp.size,
        length=tokens(plan.shares[ranks.cp.place]) if layout.tensor.sequence_norms else None,
        overlap=layout.tensor.overlap != "none",
        chunks=layout.tensor.chunks,
        loss_tile=layout.tiles.loss,
        symmetric=layout.tensor.overlap == "symmetric",
    )
    if team.symmetric:
        check_symmetric(team, ranks.device, plan.partition)
    return team


def placements(rows: Sequence[Partition], names: Iterable[str], rank: int, ranks: int) -> dict[str, Placement]:
    """Return the part of each parameter that a tensor rank holds.

    Raises RuntimeError if a parameter has no row in the plan's partition; even parameters that are not cut need a row.
    """
    names = list(names)
    row_of = by_name(rows, names)
    if missing := [name for name in names if name not in row_of]:
        raise RuntimeError(f"the plan does not say how tensor ranks share {', '.join(missing[:5])}")
    return {name: placement_of(row_of[name], rank, ranks) for name in names}


def placement_of(row: Partition, rank: int, ranks: int) -> Placement:
    """Return the part of a parameter that a tensor rank holds."""
    holders = row.holders(rank, ranks)
    spans = row.spans(rank)
    # Ranks that hold an empty part also count as copies of each other.
    summed = row.gradients == "summed" and len(holders) > 1 and all(spans)
    return Placement(row.shape, spans, counts=rank == holders[0], shared_by=holders if summed else ())


def place(model: AnyDecoder, plan: Plan, ranks: Ranks) -> None:
    """Give every parameter the shape of this rank's part, in place, and record the parts' places in the model."""
    parameter_slots = [
        (module, leaf, p) for module in model.modules() for leaf, p in module.named_parameters(recurse=False)
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    local_placements = placements(plan.partition, names.values(), ranks.tp.place, ranks.tp.size)
    made: dict[int, nn.Parameter] = {}
    for module, leaf, parameter in parameter_slots:
        shape = local_placements[names[id(parameter)]].local_shape
        if id(parameter) not in made:
            # A parameter without elements is never sharded, hence never cast to the type of computation by FSDP2.
            dtype = parameter.dtype if prod(shape) else COMPUTE_DTYPE[plan.training.precision]
            part = torch.empty(shape, dtype=dtype, device=parameter.device)
            made[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        setattr(module, leaf, made[id(parameter)])
    model.placements = MappingProxyType(local_placements)
    model.copies |= {name for name, placement in local_placements.items() if not placement.counts}


def layer_sharding(team: Team) -> LayerSharding:
    """Return how the layers of a team of tensor ranks multiply."""
    inputs, output = ColumnParallel(team), RowParallel(team)
    return LayerSharding(inputs, output, inputs, output, keys_shared_part=inputs.copy_to_tp)


def _sharding(model: Decoder | DecoderParts, plan: Plan, ranks: Ranks) -> Sharding:
    team = make_team(plan, ranks)
    of_teams: dict[int | None, LayerSharding] = {}

    def layer(block: Block) -> LayerSharding:
        of_layer = _of_layer(team, block, plan, ranks)
        return of_teams.setdefault(of_layer.length, layer_sharding(of_layer))

    head = "embed.weight" if model.config.tied_embeddings else "head.weight"
    return Sharding(
        layer,
        VocabularyRows(team, first_row(model.placements, "embed.weight")),
        None if team.length is None else SharedPositions(team),
        VocabularyLoss(team, first_row(model.placements, head)),
    )


def first_row(placements: Mapping[str, Placement], name: str) -> int:
    """Return the index of this rank's first row of a parameter; an arbitrary number if the rank holds no row."""
    ranges = placements[name].spans[0] if name in placements else ()
    return ranges[0][0] if ranges else 0
