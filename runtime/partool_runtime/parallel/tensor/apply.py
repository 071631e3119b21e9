"""Replaces a model's matrices by a tensor rank's parts, and installs the exchanges in the model's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from partool.layout.grid import whole_rows
from partool.layout.sequence import tokens
from partool.layout.tensor import Partition, by_name
from partool.plan.types import Plan
from partool.strategies.sequence import ON_GRIDS
from partool_runtime.errors import ConfigurationError
from partool_runtime.mesh import Ranks
from partool_runtime.model import AnyDecoder, Decoder, DecoderParts
from partool_runtime.model.attention import AttentionLayout, SelfAttention, Tokens
from partool_runtime.model.decoder import Block
from partool_runtime.model.ffn import FeedForward
from partool_runtime.model.latent_attention import LatentAttention
from partool_runtime.model.parts import TiedEmbedding
from partool_runtime.parallel.tensor.columns import columns
from partool_runtime.parallel.tensor.ops import Team, entered
from partool_runtime.parallel.tensor.rows import row
from partool_runtime.parallel.tensor.symmetric import check_symmetric
from partool_runtime.parallel.tensor.two_dim_apply import put_two_dim
from partool_runtime.parallel.tensor.vocabulary import vocabulary_loss, vocabulary_rows
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
    if plan.layout.tensor.inner > 1:
        put_two_dim(model, plan, ranks)
        return
    team = make_team(plan, ranks)
    _hook_inputs(model, team)
    for _, block in model.blocks():
        hook_block(cast(Any, block).attention, cast(Any, block).ffn, _of_layer(team, cast(Block, block), plan, ranks))
    _hook_head(model, team)


def _of_layer(team: Team, block: Block, plan: Plan, ranks: Ranks) -> Team:
    """Return the team of tensor ranks for a layer; ranks may hold different numbers of tokens in different layers."""
    turned = plan.layout.sequence.method in ON_GRIDS and block.attention.layout.axis == "row"
    if team.length is None or not turned or plan.model.grid is None:
        return team
    rows = whole_rows(*plan.model.grid, ranks.cp.size)[ranks.cp.place]
    found = replace(team, length=tokens(rows))
    if found.symmetric:
        check_symmetric(found, ranks.device, plan.partition)
    return found


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
    known = by_name(rows, names)
    if missing := [name for name in names if name not in known]:
        raise RuntimeError(f"the plan does not say how tensor ranks share {', '.join(missing[:5])}")
    return {name: placement_of(known[name], rank, ranks) for name in names}


def placement_of(row: Partition, rank: int, ranks: int) -> Placement:
    """Return the part of a parameter that a tensor rank holds."""
    holders = row.holders(rank, ranks)
    spans = row.spans(rank)
    # Ranks that hold an empty part also count as copies of each other.
    summed = row.gradients == "summed" and len(holders) > 1 and all(spans)
    return Placement(row.shape, spans, counts=rank == holders[0], shared_by=holders if summed else ())


def place(model: AnyDecoder, plan: Plan, ranks: Ranks) -> None:
    """Give every parameter the shape of this rank's part, in place, and record the parts' places in the model."""
    held = [(module, leaf, p) for module in model.modules() for leaf, p in module.named_parameters(recurse=False)]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = placements(plan.partition, names.values(), ranks.tp.place, ranks.tp.size)
    made: dict[int, nn.Parameter] = {}
    for module, leaf, parameter in held:
        shape = found[names[id(parameter)]].local_shape
        if id(parameter) not in made:
            # A parameter without elements is never sharded, hence never cast to the type of computation by FSDP2.
            dtype = parameter.dtype if prod(shape) else COMPUTE_DTYPE[plan.training.precision]
            part = torch.empty(shape, dtype=dtype, device=parameter.device)
            made[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        setattr(module, leaf, made[id(parameter)])
    model.placements = MappingProxyType(found)
    model.copies |= {name for name, placement in found.items() if not placement.counts}


def hook_block(attention: SelfAttention | LatentAttention, ffn: FeedForward | None, team: Team) -> None:
    """Install the exchanges around the matrices of one layer, but for those of experts."""
    if attention.o.weight.numel() == 0:
        attention.core = no_heads
    if isinstance(attention, LatentAttention):
        hook(attention, "inputs", _first_of_latent, attention, team)
    else:
        hook(attention, "inputs", _first_of_attention, attention, team)
    hook(attention, "output", _second, attention.o, team)
    if ffn is not None:
        hook_network(ffn, team)


def hook_network(ffn: FeedForward, team: Team) -> None:
    """Install the exchanges around the matrices of a feed-forward network."""
    hook(ffn, "inputs", _first_of_network, ffn, team)
    hook(ffn, "output", _second, ffn.down, team)


def no_heads(
    q_BNSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    layout: AttentionLayout,
    tokens: Tokens | None = None,
) -> torch.Tensor:
    """Compute :func:`partool_runtime.model.attend` for zero heads, which device kernels may not support."""
    del layout, tokens
    return v_BKSD + (q_BNSD.sum() + k_BKSD.sum())


def _first_of_attention(attention: SelfAttention, team: Team, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return columns(x, (attention.q, attention.k, attention.v), team)


def _first_of_latent(attention: LatentAttention, team: Team, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return all tokens' queries, keys' parts and values of this rank's heads, and the part that all keys share.

    Down-projections and norms of the latents are whole on every rank, and work on the rank's share of the tokens where
    norms do; so latents are exchanged, which are narrower than the residual stream.
    """
    latent, rope = attention.latent(x)
    if attention.compresses_queries:
        (q_BSX,) = columns(attention.q_latent(x), (attention.q_b,), team)
    else:
        (q_BSX,) = columns(x, (attention.q,), team)
    (kv_BSX,) = columns(latent, (attention.kv_b,), team)
    return q_BSX, kv_BSX, entered(rope, team)


def _first_of_network(ffn: FeedForward, team: Team, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return columns(x, (ffn.gate, ffn.up) if ffn.gated else (ffn.up,), team)


def _second(linear: nn.Linear, team: Team, x_BSI: torch.Tensor) -> torch.Tensor:
    return row(x_BSI, linear, team)


def _hook_inputs(model: Decoder | DecoderParts, team: Team) -> None:
    """Install the exchanges of embeddings, and set the sequence length of layers that hold a share of the tokens."""
    if model.embed is not None:
        first = first_row(model.placements, "embed.weight")
        # A stage's tied embedding also computes the loss, so its forward pass must stay as it is.
        seam = "rows" if isinstance(model.embed, TiedEmbedding) else "forward"
        hook(model.embed, seam, _embed, model.embed, first, team)
    if team.length is None:
        return
    if model.position is not None:
        hook(model.position, "forward", _positions, model.position, team)
    for stage in model.stages.values():
        cast(Any, stage).contexts.length = team.length


def _hook_head(model: Decoder | DecoderParts, team: Team) -> None:
    holder: Any = model.loss_module
    name = "embed.weight" if model.config.tied_embeddings else "head.weight"
    if holder is not None:
        # A partial works here, since no compiled block contains it; other code may bind further arguments to it.
        holder.loss = partial(_loss, first_row(model.placements, name), team)


def first_row(placements: Mapping[str, Placement], name: str) -> int:
    """Return the index of this rank's first row of a parameter; an arbitrary number if the rank holds no row."""
    ranges = placements[name].spans[0]
    return ranges[0][0] if ranges else 0


def _embed(embed: nn.Embedding, first: int, team: Team, tokens_BS: torch.Tensor) -> torch.Tensor:
    if team.length is not None and tokens_BS.shape[1] != team.length:
        message = f"sequences of {tokens_BS.shape[1]} tokens, but the plan expects {team.length}"
        raise ConfigurationError("PT648", message, "Use sequences of training.sequence_length tokens.")
    return vocabulary_rows(tokens_BS, embed.weight, first, team, embed.padding_idx)


def _positions(position: nn.Embedding, team: Team, positions_S: torch.Tensor) -> torch.Tensor:
    """Return the learned position embeddings of this rank's share of the tokens, with zeros for padding."""
    share, first = team.share, team.rank * team.share
    rows_XH = F.embedding(positions_S[..., first : first + share], position.weight)
    return F.pad(rows_XH, (0, 0, 0, share - rows_XH.shape[-2]))


def _loss(
    first: int, team: Team, hidden: torch.Tensor, weight_VH: torch.Tensor, labels_BS: torch.Tensor, **how: Any
) -> torch.Tensor:
    return vocabulary_loss(hidden, weight_VH, labels_BS, first=first, team=team, **how)


def hook(module: nn.Module, name: str, function: Callable[..., Any], *fixed: Any) -> None:
    """Replace ``module.name`` such that ``module.name(*arguments)`` calls ``function(*fixed, *arguments)``."""

    # A function and not a partial: torch.compile would recompile every block for a partial, and give up after eight.
    def hooked(*arguments: Any) -> Any:
        return function(*fixed, *arguments)

    setattr(module, name, hooked)
