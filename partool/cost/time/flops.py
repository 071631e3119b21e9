"""FLOPs of the model, as MFU counts them: two per weight and token, causal attention, backward twice the forward."""

from __future__ import annotations

from functools import lru_cache

from partool.cost.case import Job
from partool.cost.kinds import Kind, kinds
from partool.cost.time.attention import keys_seen
from partool.layout.parameters import parameters
from partool.spec.model import ModelConfig


@lru_cache(maxsize=16)
def matmul_flops_per_token(model: ModelConfig) -> float:
    """Return the forward FLOPs of matrix products per token: 2 per weight; experts by their share, embeddings none."""
    total = 2.0 * model.vocab * model.hidden if model.tied_embeddings else 0.0
    for info in parameters(model):
        if info.kind in ("embedding", "position", "norm") or len(info.shape) < 2:
            continue
        share = model.moe.top_k / model.moe.experts if info.kind == "expert" and model.moe is not None else 1.0
        total += 2.0 * share * info.elements
    return total


@lru_cache(maxsize=64)
def attention_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the forward FLOPs of attention scores and values per token, causal or in a window."""
    query = value = float(model.heads * model.head_dim)
    if model.mla:
        query = float(model.heads * (model.mla.nope_head_dim + model.mla.rope_head_dim))
        value = float(model.heads * model.mla.v_head_dim)
    return sum(2.0 * _keys(model, sequence_length, kind) * (query + value) for kind in kinds(model))


def _keys(model: ModelConfig, sequence_length: int, kind: Kind) -> float:
    if kind.axis and model.grid:
        return keys_seen(model.grid[1] if kind.axis == "row" else model.grid[0], None)
    return keys_seen(sequence_length, kind.window)


def model_flops(job: Job) -> float:
    """Return the FLOPs of one optimizer step over all ranks, nothing recomputed."""
    tokens = job.global_batch * job.sequence_length
    per_token = matmul_flops_per_token(job.model) + attention_flops_per_token(job.model, job.sequence_length)
    return 3.0 * tokens * per_token
