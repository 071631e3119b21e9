"""Matrix products that one rank computes under a layout, and that kernels have to cover.

A product is ``y [M, N] = x [M, K] · Wᵀ``. Its backward pass computes the gradient of the input
(``[M, K] = [M, N] · W``) and the gradient of the weight (``[N, K] = yᵀ · x`` with M as the inner width).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partool.layout.tensor import head_ranges
from partool.spec.model import ModelConfig

MULTIPLE = 16
"""fp8 needs shards of matrices whose widths are multiples of this number, because rows must have multiples of 16 bytes
(CUTLASS, cuBLAS; AMD's units take 16 or 32 values at a time). Layers of other widths stay in bf16."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Smallest and largest number of rows (M) of a product. The two are equal unless tokens are routed to experts."""

    least: int
    most: int
    mean: float
    """Number of rows if tokens are routed evenly to all experts."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """One product of the forward pass, per micro-batch."""

    name: str
    n: int
    """Output width on the rank."""
    k: int
    """Input width on the rank."""
    rows: Rows
    layers: int
    """Number of layers that compute this product; 1 for the head."""
    groups: int = 1
    """Number of products of this shape that run as one grouped product, such as the experts on the rank."""
    alike: int = 1
    """Number of products of this shape that run one after the other, such as keys and values, or gate and up."""

    @property
    def backward(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return (M, N, K) of the input's gradient and of the weight's gradient, for the largest number of rows."""
        return (self.rows.most, self.k, self.n), (self.n, self.k, self.rows.most)

    @property
    def flops(self) -> float:
        """Return the FLOPs of this product in the forward pass of one layer, for the mean number of rows."""
        return 2.0 * self.rows.mean * self.n * self.k * self.groups * self.alike


@dataclass(frozen=True, slots=True)
class _Cut:
    """The number of tensor ranks as d1 × d2."""

    ranks: int
    inner: int

    @property
    def outer(self) -> int:
        """Number of ranks (d1) over which the outputs of a layer's first matrices are sharded."""
        return self.ranks // self.inner

    def width(self, size: int) -> int:
        """Return the width of the largest shard when an output of width ``size`` is cut over d1 ranks."""
        return -(-size // self.outer)

    def hidden(self, size: int) -> int:
        """Return the width of the largest shard when the hidden size ``size`` is cut over d2 ranks."""
        return -(-size // self.inner)

    def heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Return the largest number of query heads and the largest number of key heads that one rank has."""
        dealt = head_ranges(heads, kv_heads, self.outer)
        return tuple(max(stop - start for start, stop in ranges) for ranges in (dealt.queries, dealt.keys))  # type: ignore[return-value]


def gemms(
    model: ModelConfig,
    *,
    tensor: int,
    expert: int,
    tokens: int,
    inner: int = 1,
    shares: bool = False,
    expert_tensor: int = 1,
) -> list[Gemm]:
    """Return each product of the rank with the largest shards, for ``tokens`` tokens per micro-batch.

    Products of the same kind and shape are one entry. The first matrices of a layer are cut over ``tensor`` ranks by
    columns, the second by rows (arXiv 1909.08053). If ``tensor`` is d1 · d2 with ``inner`` = d2, these cuts are over d1
    ranks, and the other dimension of each matrix is cut over d2 ranks (arXiv 2301.08658). Experts are spread over
    ``expert`` ranks, and their widths over ``expert_tensor``; tensor ranks cut them only if ``expert`` is 1. With
    ``shares`` the norms of a layer work on shares of the tokens, and so do the projections to latents.
    """
    cut = _Cut(tensor, inner)
    rows = Rows(tokens, tokens, tokens)
    rank_tokens = -(-tokens // tensor) if shares else tokens
    moe_layers = sum(model.is_moe_layer(layer) for layer in range(model.blocks))
    products = [
        Gemm(
            f"attention.{name}",
            n,
            k,
            Rows(rank_tokens, rank_tokens, rank_tokens) if name in _DOWN else rows,
            model.blocks,
            alike=alike,
        )
        for name, n, k, alike in (_latent(model, cut) if model.mla else _attention(model, cut))
    ]
    if moe_layers < model.blocks:
        products += _network(model, "ffn", (cut.width(model.ffn_hidden), cut), (rows, model.blocks - moe_layers, 1))
    for shape, layers in _layers_by_shape(model):
        products += _of_expert_layers(shape, cut, (expert, expert_tensor), rows, layers)
    products.append(Gemm("head", -(-model.vocab // tensor), model.hidden, rows, 1 + model.predictions))
    if model.predictions:
        shared = Rows(rank_tokens, rank_tokens, rank_tokens)
        products.append(Gemm("predictions.projection", model.hidden, 2 * model.hidden, shared, model.predictions))
    return products


def _layers_by_shape(model: ModelConfig) -> Iterator[tuple[ModelConfig, int]]:
    """Yield the model of each sort of layers of experts, and the number of these layers; none of a dense model."""
    places = [model.expert_shape(layer) for layer in range(model.blocks) if model.is_moe_layer(layer)]
    for place in dict.fromkeys(places):
        yield model.expert_shapes[place], places.count(place)


def _of_expert_layers(model: ModelConfig, cut: _Cut, form: tuple[int, int], rows: Rows, layers: int) -> Iterator[Gemm]:
    """Yield the products of ``layers`` layers of experts; ``form`` is (``expert``, ``expert_tensor``)."""
    moe, hidden = model.moe, cut.hidden(model.hidden)
    assert moe is not None, "a dense model"
    yield Gemm("moe.router", moe.experts, hidden, rows, layers)
    if moe.residual:
        yield Gemm("moe.coefficients", 2, hidden, rows, layers)
    if moe.shared_experts:
        yield from _network(
            model, "moe.shared", (cut.width(moe.shared_experts * moe.ffn_hidden), cut), (rows, layers, 1)
        )
    yield from _experts(model, cut, form, rows.most, layers)


def _attention(model: ModelConfig, cut: _Cut) -> Iterator[tuple[str, int, int, int]]:
    queries, keys = (heads * model.head_dim for heads in cut.heads(model.heads, model.kv_heads))
    hidden = cut.hidden(model.hidden)
    yield "q", queries, hidden, 1
    yield "k, v", keys, hidden, 2
    yield "o", hidden, queries, 1


_DOWN = ("q_a", "kv_a")
"""Projections to latents."""


def _latent(model: ModelConfig, cut: _Cut) -> Iterator[tuple[str, int, int, int]]:
    """Yield the products of latent attention (DeepSeek-V2, arXiv 2405.04434, appendix C). Latents are not cut."""
    mla = model.mla
    if mla is None:
        return
    heads, _ = cut.heads(model.heads, model.heads)
    query, latent = heads * (mla.nope_head_dim + mla.rope_head_dim), mla.kv_rank + mla.rope_head_dim
    if mla.q_rank is None:
        yield "q", query, model.hidden, 1
    else:
        yield "q_a", mla.q_rank, model.hidden, 1
        yield "q_b", query, mla.q_rank, 1
    yield "kv_a", latent, model.hidden, 1
    yield "kv_b", heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_rank, 1
    yield "o", model.hidden, heads * mla.v_head_dim, 1


def _network(model: ModelConfig, name: str, sizes: tuple[int, _Cut], times: tuple[Rows, int, int]) -> list[Gemm]:
    """Return the products of a feed-forward network; ``times`` is (rows, layers, networks per group)."""
    width, cut = sizes
    hidden, both = cut.hidden(model.hidden), 1 + model.gated
    up = "gate, up" if model.gated else "up"
    return [
        Gemm(f"{name}.{up}", width, hidden, *times, alike=both),
        Gemm(f"{name}.down", hidden, width, *times),
    ]


def _experts(model: ModelConfig, cut: _Cut, form: tuple[int, int], tokens: int, layers: int) -> list[Gemm]:
    """Return the products of the experts of one rank; ``form`` is (``expert``, ``expert_tensor``).

    An expert may get no token, or all tokens of the ranks over which the experts are spread.
    """
    moe, (expert, parts) = model.moe, form
    if moe is None:
        return []
    rank_tokens = max(tokens // cut.ranks, 1) if expert > 1 else tokens
    width = -(-moe.ffn_hidden // parts) if expert > 1 else cut.width(moe.ffn_hidden)
    most = rank_tokens * expert * parts
    rows = Rows(0, most, most * moe.top_k / moe.experts)
    each = (rows, layers, max(moe.experts // expert, 1))
    return _network(model, "moe.experts", (width, _Cut(1, 1) if expert > 1 else cut), each)
