"""Ulysses: each rank computes attention of whole sequences for some heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from partool.plan.layout import Layout
from partool_runtime import deferral
from partool_runtime.hf.attention import HfAttention
from partool_runtime.model.attention import Attend, AttentionLayout, Context, SelfAttention, Tokens
from partool_runtime.model.decoder import Block
from partool_runtime.model.latent_attention import LatentAttention
from partool_runtime.model.projection import Linear, alone
from partool_runtime.parallel.sequence.exchange import HeadExchange, Heads, Started
from partool_runtime.parallel.sequence.types import SequenceTeam
from partool_runtime.parallel.tensor.sharding import no_heads


def put(blocks: Sequence[Block], team: SequenceTeam, layout: Layout) -> None:
    """Make layers exchange tokens for heads around their attention, in place."""
    exchange = HeadExchange(team.group.group_name, team.rank, team.shares)
    for block in blocks:
        around(block.attention, exchange, WholeSequences(block.attention.core), layout)


def around(
    attention: SelfAttention | LatentAttention | HfAttention, exchange: HeadExchange, core: Attend, layout: Layout
) -> None:
    """Make attention exchange tokens for heads around ``core``, in place; a module without heads exchanges nothing.

    The exchange stays outside of ``attention.core``, which recomputation wraps, so recomputation does not repeat it.
    Layers of transformers have no seam between their projections, so queries, keys and values are sent at once.
    """
    if isinstance(attention, HfAttention):
        attention.core, attention.exchange = core, exchange
        return
    if attention.core is no_heads:
        return
    attention.core = core
    if isinstance(attention, LatentAttention):
        heads = attention.o.weight.shape[1] // attention.mla.v_head_dim
        attention.exchange = AroundLatentAttention(exchange, exchange.ranges(heads, heads))
        return
    # In two-dimensional tensor parallelism, inner ranks hold parts of the same heads' weights, and divide the heads.
    width = attention.head_dim * layout.tensor.inner
    heads_of = (attention.q.weight.shape[0] // width, attention.k.weight.shape[0] // width)
    attention.exchange = AroundAttention(exchange, exchange.ranges(*heads_of))


@dataclass(frozen=True, slots=True)
class AroundAttention:
    """:class:`~partool_runtime.model.attention.HeadsExchange` of :class:`SelfAttention`."""

    exchange: HeadExchange
    heads: tuple[tuple[Heads, ...], tuple[Heads, ...]]
    """Each rank's query heads, and its key heads."""

    def __call__(self, attention: SelfAttention, x_BSH: torch.Tensor, context: Context) -> torch.Tensor:
        """Compute attention; keys are sent while queries are projected, and queries while values are projected.

        In the backward pass the gradients of values arrive first, and pass through the projection of values while the
        other gradients are in flight; the gradients of the result are sent while the gradient of the output matrix is
        computed.
        """
        (of_queries, of_keys), start = self.heads, self.exchange.start
        if attention.inputs.joint:
            q_BSX, k_BSX, v_BSX = attention.inputs(x_BSH, (attention.q, attention.k, attention.v))
            travelling = [
                start(attention.keys(k_BSX, context), of_keys),
                start(attention.queries(q_BSX, context), of_queries),
                start(attention.values(v_BSX), of_keys),
            ]
        else:
            travelling = [
                start(attention.keys(attention.k(x_BSH), context), of_keys),
                start(attention.queries(attention.q(x_BSH), context), of_queries),
                start(attention.values(attention.v(x_BSH)), of_keys),
            ]
        return _attended(attention, self.exchange, travelling, context)


@dataclass(frozen=True, slots=True)
class AroundLatentAttention:
    """:class:`~partool_runtime.model.attention.HeadsExchange` of :class:`LatentAttention`."""

    exchange: HeadExchange
    heads: tuple[tuple[Heads, ...], tuple[Heads, ...]]
    """Each rank's query heads, and its key heads."""

    def __call__(self, attention: LatentAttention, x_BSH: torch.Tensor, context: Context) -> torch.Tensor:
        """Compute latent attention; the expanded heads travel, each tensor while the next one is assembled."""
        (of_queries, of_keys), start = self.heads, self.exchange.start
        q_BSX, kv_BSX, rope_BSR = attention.projected(x_BSH)
        travelling = [
            start(attention.keys(kv_BSX, rope_BSR, context), of_keys),
            start(attention.queries(q_BSX, context), of_queries),
            start(attention.values(kv_BSX), of_keys),
        ]
        return _attended(attention, self.exchange, travelling, context)


def _attended(
    attention: SelfAttention | LatentAttention, exchange: HeadExchange, travelling: list[Started], context: Context
) -> torch.Tensor:
    """Return the layer's result from keys, queries and values whose exchange is in flight."""
    sinks_n = getattr(attention, "sinks", None)
    if sinks_n is not None:
        sinks_n = sinks_n[slice(*travelling[1].way.heads[exchange.rank])]
    core = partial(attention.core, layout=attention.layout, tokens=context.tokens, sinks_N=sinks_n)
    out_BnLD, way = exchange.compute(travelling, core)
    if sinks_n is not None and not len(sinks_n):
        out_BnLD = out_BnLD + sinks_n.sum()  # every rank has a gradient of the sinks, which ranks sum
    # A compiler orders exchanges by itself; deferred weight gradients leave no computation to overlap exchanges with.
    if torch.compiler.is_compiling() or deferral.is_splitting():
        apart = True
    else:  # a wrapped matrix computes more than a product, or has to be gathered
        apart = attention.output is not alone or type(attention.o) is not Linear or attention.o.stored is not None
    if apart:
        return attention.output(exchange.back(out_BnLD, way).transpose(1, 2).flatten(-2), attention.o)
    return exchange.projected(out_BnLD, way, attention.o)


class WholeSequences:
    """Makes an attention function for whole sequences usable in passes whose ranks hold only shares of the tokens."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        tokens: Tokens | None,
        *,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of all tokens, see :func:`partool_runtime.model.attention.attend`."""
        if tokens is not None:
            tokens = Tokens(tokens.length, None, tokens.documents_BL, tokens.grid)
        if sinks_N is None:  # attention of transformers' models takes none
            return self._attend(q_BNSD, k_BKSD, v_BKSD, layout, tokens)
        return self._attend(q_BNSD, k_BKSD, v_BKSD, layout, tokens, sinks_N=sinks_N)
