"""Bytes saved for the backward pass, by recompute policy.

Counted from the operators of the runtime's decoder: what autograd keeps of each. Korthikanti et al. (arXiv 2205.05198,
section 4) count the same way for GPT; here the sizes follow grouped-query attention and gated networks.
"""

from __future__ import annotations

from partool.cost.work import Work
from partool.spec.parallel import Recompute


def activation_bytes(work: Work) -> int:
    """Return the bytes of saved tensors at the peak, over the micro-batches in flight of the fullest stage."""
    start, stop = work.layout.stages[0]
    held = sum(layer_elements(work, work.layout.recompute[layer], layer) for layer in range(start, stop))
    transient = 0
    if any(policy != "none" for policy in work.layout.recompute[start:stop]):
        # One layer's tensors are rebuilt while its backward pass runs.
        transient = max(layer_elements(work, "none", layer) for layer in range(start, stop))
    in_flight = min(work.layout.accumulation, len(work.layout.stages))
    return int((held * in_flight + transient) * work.compute_bytes)


def layer_elements(work: Work, policy: Recompute, layer: int) -> int:
    """Return the elements that one layer saves for one micro-batch under a policy."""
    m, tokens, tensor = work.model, work.tokens_per_micro_batch, work.layout.mesh.tp
    if policy == "full":
        return tokens * m.hidden
    if m.mla:
        query = m.heads * (m.mla.nope_head_dim + m.mla.rope_head_dim)
        key = value = m.heads * max(m.mla.nope_head_dim + m.mla.rope_head_dim, m.mla.v_head_dim)
    else:
        query, key, value = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim
    width = _ffn_width(work, layer)
    attention_out = query
    if (
        policy == "selective"
    ):  # outputs of matrix products and of attention; norms, activations and rotations are redone
        kept = query + key + value + attention_out + (2 if m.gated else 1) * width
        return tokens * (2 * m.hidden + kept // tensor)
    # Both norms keep their input and their output; attention keeps rotated q and k, v and its output; a gated network
    # keeps gate, up, the activated gate and their product.
    ffn = (4 if m.gated else 2) * width
    inputs = 4 * m.hidden
    return tokens * (inputs + (query + key + value + attention_out + ffn) // tensor)


def _ffn_width(work: Work, layer: int) -> int:
    moe = work.model.moe
    if moe is None or not work.model.is_moe_layer(layer):
        return work.model.ffn_hidden
    return (moe.top_k + moe.shared_experts) * moe.ffn_hidden
