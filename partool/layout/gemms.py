"""Matrix products that one rank computes under a layout: what kernels have to cover.

A product is ``y [M, N] = x [M, K] · Wᵀ``. Its backward pass computes the gradient of the input,
``[M, K] = [M, N] · W``, and of the weight, ``[N, K] = yᵀ · x`` with M as the inner width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partool.spec.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """Least and most rows (M) of a product; equal where routing does not decide."""

    least: int
    most: int


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
    """Layers of the model that have it; 1 for the head."""
    groups: int = 1
    """Products of this shape that run together: experts on the rank."""

    @property
    def backward(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(M, N, K) of the gradients of the input and of the weight, at the most rows."""
        return (self.rows.most, self.k, self.n), (self.n, self.k, self.rows.most)


def gemms(model: ModelConfig, *, tensor: int, expert: int, tokens: int) -> list[Gemm]:
    """Return the products of a rank that works on ``tokens`` tokens per micro-batch, each shape once.

    Matrices are cut over ``tensor`` ranks by columns, then by rows (arXiv 1909.08053). Experts are spread over
    ``expert`` ranks; they are cut over tensor ranks only where that is one.
    """
    rows = Rows(tokens, tokens)
    moe_layers = sum(model.is_moe_layer(layer) for layer in range(model.layers))
    found = [
        Gemm(f"attention.{name}", n, k, rows, model.layers)
        for name, n, k in (_latent(model, tensor) if model.mla else _attention(model, tensor))
    ]
    if moe_layers < model.layers:
        found += _network(model, "ffn", model.ffn_hidden // tensor, (rows, model.layers - moe_layers, 1))
    if model.moe is not None and moe_layers:
        found.append(Gemm("moe.router", model.moe.experts, model.hidden, rows, moe_layers))
        if model.moe.shared_experts:
            width = model.moe.shared_experts * model.moe.ffn_hidden // tensor
            found += _network(model, "moe.shared", width, (rows, moe_layers, 1))
        found += _experts(model, tensor, expert, tokens, moe_layers)
    found.append(Gemm("head", -(-model.vocab // tensor), model.hidden, rows, 1))
    return found


def _attention(model: ModelConfig, tensor: int) -> Iterator[tuple[str, int, int]]:
    query = model.heads * model.head_dim // tensor
    # With fewer key heads than tensor ranks each rank holds a whole one.
    keys = max(model.kv_heads // tensor, 1) * model.head_dim
    yield "q", query, model.hidden
    yield "k, v", keys, model.hidden
    yield "o", model.hidden, query


def _latent(model: ModelConfig, tensor: int) -> Iterator[tuple[str, int, int]]:
    """Yield the products of latent attention (DeepSeek-V2, arXiv 2405.04434, appendix C); the latents are not cut."""
    mla = model.mla
    if mla is None:
        return
    heads = model.heads // tensor
    query = heads * (mla.nope_head_dim + mla.rope_head_dim)
    if mla.q_rank is None:
        yield "q", query, model.hidden
    else:
        yield "q_a", mla.q_rank, model.hidden
        yield "q_b", query, mla.q_rank
    yield "kv_a", mla.kv_rank + mla.rope_head_dim, model.hidden
    yield "kv_b", heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_rank
    yield "o", model.hidden, heads * mla.v_head_dim


def _network(model: ModelConfig, name: str, width: int, times: tuple[Rows, int, int]) -> list[Gemm]:
    """Return the products of a feed-forward network; ``times``: rows, layers that have it, networks side by side."""
    up = "gate, up" if model.gated else "up"
    return [
        Gemm(f"{name}.{up}", width, model.hidden, *times),
        Gemm(f"{name}.down", model.hidden, width, *times),
    ]


def _experts(model: ModelConfig, tensor: int, expert: int, tokens: int, layers: int) -> list[Gemm]:
    """Return an expert's products; routing may send it nothing, or every token of the ranks that share the experts."""
    moe = model.moe
    if moe is None:
        return []
    own = max(tokens // tensor, 1) if expert > 1 else tokens
    width = moe.ffn_hidden if expert > 1 else moe.ffn_hidden // tensor
    each = (Rows(0, own * expert), layers, max(moe.experts // expert, 1))
    return _network(model, "moe.experts", width, each)
