"""Causal self-attention with grouped queries (Ainslie et al., arXiv 2305.13245) and sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from partool.layout.grid import Axis
from partool.spec.model import ModelConfig
from partool_runtime.model.norm import RMSNorm
from partool_runtime.model.operator import attend_by
from partool_runtime.model.projection import SEPARATE, InputProducts, Linear, OutputProduct, alone
from partool_runtime.model.rope import Tables, rotate, score_scale
from partool_runtime.model.visibility import AttentionLayout as AttentionLayout  # noqa: PLC0414
from partool_runtime.model.visibility import visible as visible  # noqa: PLC0414


def folded(x_BNSD: torch.Tensor, axis: Axis, grid: tuple[int, int]) -> torch.Tensor:
    """Return heads with each line of a grid of S tokens as a separate sequence, ``[B · lines, N, line length, D]``.

    A line is a row or a column of the grid ``(rows, columns)``: ``axis`` selects. The S tokens form some or all rows,
    or some or all columns; each of these lines is complete.
    """
    batch, heads, count, dim = x_BNSD.shape
    x_BRCND = x_BNSD.transpose(1, 2).reshape(batch, *_lines(count, axis, grid), heads, dim)
    x_BXLND = x_BRCND if axis == "row" else x_BRCND.transpose(1, 2)
    return x_BXLND.flatten(0, 1).transpose(1, 2)


def unfolded(x_XNLD: torch.Tensor, batch: int, axis: Axis) -> torch.Tensor:
    """Undo :func:`folded`; return ``[B, N, S, D]``."""
    lines, heads, length, dim = x_XNLD.shape
    # In memory tokens come before heads, for the output projection: columns are copied once, rows not at all.
    x_BXLND = x_XNLD.transpose(1, 2).reshape(batch, lines // batch, length, heads, dim)
    x_BRCND = x_BXLND if axis == "row" else x_BXLND.transpose(1, 2)
    return x_BRCND.reshape(batch, -1, heads, dim).transpose(1, 2)


def folded_documents(documents_BS: torch.Tensor, axis: Axis, grid: tuple[int, int]) -> torch.Tensor:
    """Return the document number of each token in the layout of :func:`folded`, ``[B · lines, line length]``."""
    documents_BRC = documents_BS.reshape(documents_BS.shape[0], *_lines(documents_BS.shape[1], axis, grid))
    return (documents_BRC if axis == "row" else documents_BRC.transpose(1, 2)).flatten(0, 1)


def _lines(tokens: int, axis: Axis, grid: tuple[int, int]) -> tuple[int, int]:
    """Return how many rows and how many columns of the grid ``tokens`` tokens form."""
    rows, columns = grid
    return (tokens // columns, columns) if axis == "row" else (rows, tokens // rows)


_HALF = (torch.float16, torch.bfloat16)


def attention_layout(config: ModelConfig, layer: int) -> AttentionLayout:
    """Return the attention layout of a layer, counted from 0."""
    kind = config.attention_kind(layer)
    window, axis = config.window if kind == "sliding" else None, kind if kind in ("row", "column") else None
    return AttentionLayout(window, axis, score_scale(config))


class Tokens:
    """The tokens of a pass: their positions and documents.

    Attention masks follow from these positions, never from indices in a shard. The object is opaque, so that wrappers
    do not cast its tensors.
    """

    def __init__(
        self,
        length: int,
        index_S: torch.Tensor | None = None,
        documents_BL: torch.Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> None:
        self.length = length
        """Tokens of the whole sequence (L)."""
        self.index_S = index_S
        """Positions in the sequence, int64, of the S tokens that this rank holds; None if it holds all in order."""
        self.documents_BL = documents_BL
        """Document number of every token of the whole sequence, int32; None if all are in one document."""
        self.grid = grid
        """Rows and columns of the sequence."""


class Context:
    """Tensors that all layers share in one pass; an opaque object, so that no wrapper casts them to a 16-bit type."""

    def __init__(self, rope: Tables | None, tokens: Tokens) -> None:
        self.rope = rope
        """Rotary tables for the tokens that this rank holds."""
        self.tokens = tokens
        self.along_rows: Context | None = None
        """Context of layers that attend along the rows of a grid, if this rank holds other tokens in these layers."""
        self.keys_BS: torch.Tensor | None = None
        """Keys of this rank's tokens for dropout (:mod:`partool_runtime.model.dropout`); None without dropout."""


class Attend(Protocol):
    """Type of :func:`attend` and of what replaces it: attention along sequences that several ranks share, kernels."""

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
        """Return the attention of this rank's queries to all keys that they see, ``[B, N, S, D]``.

        S is the number of this rank's tokens, N and K the numbers of its query and key heads. ``tokens.index_S``, the
        window of ``layout`` and ``tokens.documents_BL`` determine the keys that a query sees. ``sinks_N`` are the sinks
        of this rank's query heads, None in a model without.
        """


def attend(
    q_BNSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    layout: AttentionLayout,
    tokens: Tokens | None = None,
    *,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal attention softmax(q kᵀ / √D) v, ``[B, N, S, V]``, of queries and keys of a whole sequence.

    With sinks, softmax counts one more key for each head, whose score is the head's sink and whose value is zero.

    K key-value heads serve N query heads, N a multiple of K. Values may have another width (V) than queries and keys.
    Methods of sequence parallelism replace this function. If ``layout`` has an axis of a grid, the tokens may be only
    some of the grid's rows or columns.
    """
    if layout.axis is not None:
        return _along((q_BNSD, k_BKSD, v_BKSD), layout, tokens, sinks_N)
    documents_BL = None if tokens is None else tokens.documents_BL
    # torch's fast kernels for one call take heads of one width, and no sinks.
    several = documents_BL is not None or sinks_N is not None or q_BNSD.shape[3] != v_BKSD.shape[3]
    if several or (layout.window is not None and layout.window < k_BKSD.shape[2]):
        return attend_by((q_BNSD, k_BKSD, v_BKSD), layout, documents_BL, sinks_N=sinks_N)
    grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
    if grouped and q_BNSD.is_cuda and q_BNSD.dtype not in _HALF:
        # Only the flash kernel takes fewer key heads, and no wide types: without copies the fallback kernel would
        # hold all N·S·S scores.
        copies = q_BNSD.shape[1] // k_BKSD.shape[1]
        k_BKSD, v_BKSD = (heads.repeat_interleave(copies, dim=1) for heads in (k_BKSD, v_BKSD))
        grouped = False
    return F.scaled_dot_product_attention(
        q_BNSD, k_BKSD, v_BKSD, is_causal=True, scale=layout.scale, enable_gqa=grouped
    )


def _along(
    heads: tuple[torch.Tensor, ...], layout: AttentionLayout, tokens: Tokens | None, sinks_N: torch.Tensor | None
) -> torch.Tensor:
    """Return the attention of queries to keys, where each row or column of a grid is a separate sequence."""
    grid, axis = None if tokens is None else tokens.grid, layout.axis
    assert tokens is not None
    assert axis is not None, "a layer along no axis"
    assert grid is not None, "a layer along the axis of no grid"
    batch, device = heads[0].shape[0], heads[0].device
    q_XNLD, k_XKLD, v_XKLD = (folded(x_BNSD, axis, grid) for x_BNSD in heads)
    length, documents_XL = q_XNLD.shape[2], None
    if tokens.documents_BL is not None:
        documents_BL = tokens.documents_BL.to(device)
        documents_BS = documents_BL if tokens.index_S is None else documents_BL[:, tokens.index_S]
        documents_XL = folded_documents(documents_BS, axis, grid)
    full_layout = AttentionLayout(None, scale=layout.scale)
    lines = Tokens(length, None, documents_XL)
    return unfolded(attend(q_XNLD, k_XKLD, v_XKLD, full_layout, lines, sinks_N=sinks_N), batch, axis)


def heads_of(x_BSX: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return ``[B, S, heads · D]`` as ``[B, S, heads, D]``."""
    # unflatten(-1, (-1, head_dim)) would fail on a tensor rank without heads.
    return x_BSX.view(*x_BSX.shape[:-1], x_BSX.shape[-1] // head_dim, head_dim)


Turn = Callable[[torch.Tensor, nn.Module | None, Tables | None], torch.Tensor]
"""Function with the interface of :func:`turned`, possibly a kernel."""


def turned(heads_BSND: torch.Tensor, norm: nn.Module | None, rope: Tables | None) -> torch.Tensor:
    """Return heads ``[B, S, N, D]`` as ``[B, N, S, D]``, normalised if ``norm`` is given and rotated if ``rope`` is."""
    heads_BNSD = (heads_BSND if norm is None else norm(heads_BSND)).transpose(1, 2)
    return heads_BNSD if rope is None else rotate(heads_BNSD, rope)


_Module_contra = TypeVar("_Module_contra", bound=nn.Module, contravariant=True)


class HeadsExchange(Protocol[_Module_contra]):
    """How ranks that share sequences compute a layer's attention if they exchange tokens for heads."""

    def __call__(self, attention: _Module_contra, x_BSH: torch.Tensor, context: Context) -> torch.Tensor:
        """Map this rank's tokens ``[B, S, H]`` to ``[B, S, H]`` with the projections and the core of ``attention``."""


class SelfAttention(nn.Module):
    """Projections, optional norms of query and key heads, rotation, :func:`attend`, and the output projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.core: Attend = attend
        """Function that computes attention; methods of sequence parallelism replace it, recomputation wraps it."""
        self.inputs: InputProducts = SEPARATE
        """Multiplies by the projections of queries, keys and values, which share their input."""
        self.output: OutputProduct = alone
        """Multiplies by the projection of all heads' results."""
        self.exchange: HeadsExchange[SelfAttention] | None = None
        """How ranks that share sequences exchange tokens for heads around the core; None if they exchange none."""
        self.turn: Turn = turned
        """Function that norms and rotates queries and keys; a kernel may do both in one pass."""
        self.layout = attention_layout(config, layer)
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = Linear(config.hidden, queries, bias=config.qkv_bias)
        self.k = Linear(config.hidden, keys, bias=config.qkv_bias)
        self.v = Linear(config.hidden, keys, bias=config.qkv_bias)
        self.o = Linear(queries, config.hidden, bias=config.out_bias)
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None
        """Score of one more key of each head, ``[N]``; None without."""
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x_BSH: torch.Tensor, context: Context) -> torch.Tensor:
        """Map ``[B, S, H]`` to ``[B, S, H]``."""
        if self.exchange is not None:
            return self.exchange(self, x_BSH, context)
        q_BSX, k_BSX, v_BSX = self.inputs(x_BSH, (self.q, self.k, self.v))
        q_BNSD, k_BKSD = self.queries(q_BSX, context), self.keys(k_BSX, context)
        out_BNSD = self.core(q_BNSD, k_BKSD, self.values(v_BSX), self.layout, context.tokens, sinks_N=self.sinks)
        return self.output(out_BNSD.transpose(1, 2).flatten(-2), self.o)

    def queries(self, q_BSX: torch.Tensor, context: Context) -> torch.Tensor:
        """Return projected queries as heads ``[B, N, S, D]``, normalised and rotated."""
        return self.turn(heads_of(q_BSX, self.head_dim), self.q_norm if self.qk_norm else None, context.rope)

    def keys(self, k_BSX: torch.Tensor, context: Context) -> torch.Tensor:
        """Return projected keys as heads ``[B, K, S, D]``, normalised and rotated."""
        return self.turn(heads_of(k_BSX, self.head_dim), self.k_norm if self.qk_norm else None, context.rope)

    def values(self, v_BSX: torch.Tensor) -> torch.Tensor:
        """Return projected values as heads ``[B, K, S, D]``."""
        return heads_of(v_BSX, self.head_dim).transpose(1, 2)
