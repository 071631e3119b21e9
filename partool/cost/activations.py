"""Bytes saved for the backward pass, by recompute policy.

Counted from the operators of the runtime's decoder: what autograd keeps of each. Korthikanti et al. (arXiv 2205.05198,
section 4) count the same way for GPT; here the sizes follow grouped-query attention and gated networks.
"""

from __future__ import annotations

from partool.cost.work import Work
from partool.spec.parallel import Recompute

_WIDE_BYTES = 4


def activation_bytes(work: Work) -> int:
    """Return the bytes of saved tensors at the peak, over the micro-batches in flight of the fullest stage."""
    start, stop = work.layout.stages[0]
    layers = range(start, stop)
    saved = [layer_bytes(work, work.layout.recompute[layer], layer) for layer in layers]
    whole = [layer_bytes(work, "none", layer) for layer in layers]
    # One layer's tensors are rebuilt while its backward pass runs.
    rebuilt = max(max(0, there - kept) for there, kept in zip(whole, saved, strict=True))
    in_flight = min(work.layout.accumulation, len(work.layout.stages))
    return sum(saved) * in_flight + rebuilt + _norm_bytes(work) * work.tokens_per_micro_batch


def layer_bytes(work: Work, policy: Recompute, layer: int) -> int:
    """Return the bytes that one layer saves for one micro-batch under a policy."""
    m, tensor, tokens = work.model, work.layout.mesh.tp, work.tokens_per_micro_batch
    small = work.compute_bytes
    if policy == "full":
        return tokens * m.hidden * small
    query, key, value, out = attention_widths(work)
    width = ffn_width(work, layer)
    gates = 2 if m.gated else 1
    if policy == "selective":
        # The block's input, results of the matrix products (also o's and down's) and of attention.
        kept = (query + key + value + out + gates * width) // tensor
        return tokens * small * (3 * m.hidden + kept)
    if work.layout.compile == "block":
        # The partitioner keeps what matrix products and attention need and redoes what is element-wise between them.
        return tokens * small * (2 * m.hidden + (query + key + value + out + gates * width) // tensor)
    # q and k after rotation, v, the result, and the logarithm of each row's sum; act(gate), gate, up and their product.
    attention = query + key + value + out
    ffn = {"relu": 1, "gelu": 2, "gelu_tanh": 2}.get(m.activation, 4) * width
    sums = m.heads * _wide(work)
    return tokens * (2 * _norm_bytes(work) + (small * (attention + ffn) + sums) // tensor)


def attention_widths(work: Work) -> tuple[int, int, int, int]:
    """Return the elements per token of queries, keys, values and the result of attention."""
    m = work.model
    if m.mla:
        query = m.heads * (m.mla.nope_head_dim + m.mla.rope_head_dim)
        return query, query, m.heads * m.mla.v_head_dim, m.heads * m.mla.v_head_dim
    query, key = m.heads * m.head_dim, m.kv_heads * m.head_dim
    return query, key, key, query


def ffn_width(work: Work, layer: int) -> int:
    """Return the inner width of a layer's feed-forward network per token; with experts, of those a token visits."""
    moe = work.model.moe
    if moe is None or not work.model.is_moe_layer(layer):
        return work.model.ffn_hidden
    return (moe.top_k + moe.shared_experts) * moe.ffn_hidden


def _wide(work: Work) -> int:
    return max(work.compute_bytes, _WIDE_BYTES)


def _norm_bytes(work: Work) -> int:
    """Return the bytes per token that a norm keeps: RMSNorm its wide input, the normalised and the scaled result."""
    hidden, small, wide = work.model.hidden, work.compute_bytes, _wide(work)
    if work.model.norm == "layernorm":
        return 2 * hidden * small + 2 * wide
    return hidden * (wide + 2 * small) + wide
