"""Gives a rank its experts, and sets the exchanges of layers whose experts several ranks share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from partool.layout.mesh import shard_rows
from partool.layout.tensor import Range
from partool.plan.types import Plan
from partool_runtime.mesh import MeshAxis, Ranks
from partool_runtime.model import Block, Decoder, DecoderParts
from partool_runtime.model.moe import Dispatch, MixtureOfExperts
from partool_runtime.parallel.comm import EXPERT
from partool_runtime.parallel.expert.dispatch import ExpertTeam, Read
from partool_runtime.parallel.expert.node_first import NodeFirst
from partool_runtime.parallel.expert.node_routes import NodeTeam
from partool_runtime.parallel.expert.tokens import TokenShares
from partool_runtime.parallel.tensor.apply import layer_sharding, make_team
from partool_runtime.parallel.tensor.ops import Team, copy_to_tp, reduce_from_tp, start_tokens, tokens
from partool_runtime.parallel.tensor.sharding import shard_network
from partool_runtime.placement import Placement


def apply_experts(model: Decoder | DecoderParts, plan: Plan, ranks: Ranks, read: Read) -> None:
    """Cut the layers of experts to this rank's share, in place, after tensor parallelism has cut the other layers.

    If ranks share experts (``parallel.expert``), each holds consecutive experts of every layer, or a part of the inner
    widths of each (``parallel.expert_tensor``), and tensor ranks divide their tokens. Otherwise tensor ranks hold parts
    of the inner widths of every expert.
    """
    layers = {number: block.moe for number, block in model.blocks() if isinstance(block, Block) and block.moe}
    expert = ranks.expert
    if plan.model.moe is None:
        return
    team = make_team(plan, ranks) if ranks.tp.size > 1 else None
    if team is not None:
        _divide(layers.values(), team, expert is not None)
        for number, layer in layers.items():
            _first_column(model, f"layers.{number}.moe", layer, 1)
    if expert is None:
        return
    token_places = TokenShares.of(plan, ranks.cp.place, ranks.tp.place, tensor=ranks.tp.size).places
    tokens_of = tuple(len(token_places[rank % len(token_places)]) for rank in expert.mine)
    parts = plan.layout.expert_tensor
    exchange = _exchange(plan, ranks, expert, tokens_of, read)
    for number, layer in layers.items():
        _place(model, f"layers.{number}.moe", layer, expert, parts)
        layer.dispatch = exchange


def _exchange(plan: Plan, ranks: Ranks, expert: MeshAxis, tokens: tuple[int, ...], read: Read) -> Dispatch:
    """Return the exchange that the plan names; a collective of all ranks, which open its groups."""
    parts, exchange = plan.layout.expert_tensor, plan.layout.expert_exchange
    rail, node = ranks.expert_rail, ranks.expert_node
    if rail is None or node is None:
        return ExpertTeam(_group_name(ranks, expert), expert.place, tokens, read, parts)
    names = _group_name(ranks, rail), _group_name(ranks, node)
    return NodeFirst(NodeTeam(*names, expert.place, node.size, tokens, read, parts, exchange == "node_first_summed"))


def _group_name(ranks: Ranks, axis: MeshAxis) -> str:
    group = ranks.groups.of(axis.parts, EXPERT)
    assert group is not None, "one rank has no group"
    return str(group.group_name)


def _divide(layers: Iterable[MixtureOfExperts], team: Team, exchanged: bool) -> None:
    """Make tensor ranks divide the work of layers: their tokens if experts are ``exchanged``, else experts' widths."""
    for layer in layers:
        layer.division = DividedTokens(team) if exchanged else CutWidths(team)
        if exchanged and layer.shared is not None:
            shard_network(layer.shared, layer_sharding(team))


def _place(model: Decoder | DecoderParts, name: str, layer: MixtureOfExperts, axis: MeshAxis, parts: int) -> None:
    """Give the experts' matrices this rank's experts, or its part of their widths, and record their places."""
    placements = dict(model.placements)
    for leaf, stacked in layer.experts.stacked():
        for ending, parameter in list(stacked.named_parameters(recurse=False)):
            place = (axis.place, axis.size)
            placement = expert_placement(leaf, tuple(parameter.shape), layer.number, place, parts)
            part = torch.empty(placement.local_shape, dtype=parameter.dtype, device=parameter.device)
            setattr(stacked, ending, nn.Parameter(part, requires_grad=parameter.requires_grad))
            full = f"{name}.experts.{leaf}.{ending}"
            placements[full] = placement
            model.copies -= {full}
    model.placements = MappingProxyType(placements)
    _first_column(model, name, layer, parts)


def _first_column(model: Decoder | DecoderParts, name: str, layer: MixtureOfExperts, cuts: int) -> None:
    """Tell the experts' last matrices to which columns of the sum over ranks this rank adds its biases."""
    down = layer.experts.down
    placement = model.placements.get(f"{name}.experts.down.bias")
    if down.bias is None or placement is None:
        return
    spans, width = placement.spans[0], placement.shape[0] // layer.number
    down.first_column = spans[0][0] % width if spans else 0


def expert_placement(leaf: str, shape: tuple[int, ...], experts: int, among: tuple[int, int], parts: int) -> Placement:
    """Return the place of a rank's part of a layer's stacked matrices or biases, which have ``shape``.

    ``among`` is the rank's place among the ranks that share the layer's experts, and the number of these ranks.
    ``parts`` neighbours hold consecutive ranges of the inner widths, the columns of ``down``, of the same experts. As
    their results are summed, they share the bias of ``down`` by ranges of the hidden width.
    """
    rows, *columns = shape
    place, ranks = among
    place, part = divmod(place, parts)
    here = experts * parts // ranks
    each = rows // experts
    first = place * here * each
    row_ranges: tuple[Range, ...] = ((first, first + here * each),)
    if leaf == "down" and columns:
        return Placement(shape, (row_ranges, (_bounds(columns[0], parts, part),)))
    if parts > 1:
        start, stop = _bounds(each, parts, part)
        row_ranges = tuple((at + start, at + stop) for at in range(first, first + here * each, each))
    return Placement(shape, (row_ranges, *(((0, width),) for width in columns)))


def _bounds(size: int, parts: int, part: int) -> Range:
    rows = shard_rows(size, parts, part)
    return rows.start, rows.stop


class CutWidths:
    """:class:`~partool_runtime.model.moe.Division` of experts that are cut as dense networks are.

    Shared experts are cut likewise, so one sum over the ranks is of both results.
    """

    joined = True

    def __init__(self, team: Team) -> None:
        self.team = team

    def enter(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return all tokens; the gradient is summed over the ranks."""
        return copy_to_tp(x_BSH, self.team)

    def leave(self, out_BSH: torch.Tensor, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks."""
        del x_BSH
        return reduce_from_tp(out_BSH, self.team)


class DividedTokens:
    """:class:`~partool_runtime.model.moe.Division` by which tensor ranks route different tokens.

    The shared experts keep the exchanges of a dense network.
    """

    joined = False

    def __init__(self, team: Team) -> None:
        self.team = team

    def enter(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the tokens that this rank routes: its share of all tokens, or its share without the padding."""
        team = self.team
        if team.length is not None:
            start, stop = shard_rows(team.length, team.ranks, team.rank)
            return x_BSH[:, : stop - start]
        mine: torch.Tensor = _Share.apply(x_BSH, team)  # type: ignore[no-untyped-call]
        return mine

    def leave(self, out_BSH: torch.Tensor, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the results of the layer's inputs ``x_BSH`` from those of this rank's tokens."""
        team = self.team
        if team.length is not None:
            return F.pad(out_BSH, (0, 0, 0, team.share - out_BSH.shape[1]))
        everyone: torch.Tensor = _AllShares.apply(out_BSH, x_BSH.shape[1], team)  # type: ignore[no-untyped-call]
        return everyone


def _slice(x_BSH: torch.Tensor, team: Team) -> torch.Tensor:
    return x_BSH[:, slice(*shard_rows(x_BSH.shape[1], team.ranks, team.rank))]


def _gather(x_BsH: torch.Tensor, length: int, team: Team) -> torch.Tensor:
    """Return all tokens ``[B, length, H]`` from each rank's share."""
    sized_team = replace(team, length=length)
    padded = F.pad(x_BsH, (0, 0, 0, sized_team.share - x_BsH.shape[1]))
    return tokens(start_tokens(padded, sized_team), sized_team)


class _Share(torch.autograd.Function):
    """A rank's share of tokens that every rank has; the backward pass gathers the gradients of all shares."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BSH: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.team, ctx.length = team, x_BSH.shape[1]  # type: ignore[attr-defined]
        return _slice(x_BSH, team)

    @staticmethod
    def backward(ctx: Any, grad_BsH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grad_BsH, ctx.length, ctx.team), None


class _AllShares(torch.autograd.Function):
    """All ranks' shares, gathered; every rank has the same gradient of them, of which it takes its share."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BsH: torch.Tensor, length: int, team: Team) -> torch.Tensor:
        ctx.team = team  # type: ignore[attr-defined]
        return _gather(x_BsH, length, team)

    @staticmethod
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _slice(grad_BSH, ctx.team), None, None
