"""Floating-point operations of one sequence, per layer and head; one multiply-add counts as two."""

from __future__ import annotations

from partool.layout.parameters import layer_parameters
from partool.spec.model import ModelConfig


def matmul_flops_per_token(model: ModelConfig, layer: int) -> int:
    """Return the matrix products of one layer for one token, forward: two operations per weight it passes through."""
    total = 0
    for info in layer_parameters(model, layer):
        if len(info.shape) < 2:
            continue
        used = info.elements
        if info.kind == "expert" and model.moe is not None:
            used = used * model.moe.top_k // model.moe.experts
        total += 2 * used
    return total


def attended_pairs(sequence_length: int, window: int | None) -> int:
    """Return the pairs of query and key under a causal mask, with a window where one is given.

    Query i (from 1) sees ``min(i, window)`` keys, itself included.
    """
    if window is None or window >= sequence_length:
        return sequence_length * (sequence_length + 1) // 2
    return window * (window + 1) // 2 + (sequence_length - window) * window


def attention_flops(model: ModelConfig, layer: int, sequence_length: int) -> int:
    """Return the operations of softmax(QKᵀ)V of one layer for one sequence, forward: 2 d per pair for each product."""
    window = model.window if model.attention_kind(layer) == "sliding" else None
    key_dim = value_dim = model.head_dim
    if model.mla is not None:
        key_dim, value_dim = model.mla.nope_head_dim + model.mla.rope_head_dim, model.mla.v_head_dim
    return 2 * model.heads * (key_dim + value_dim) * attended_pairs(sequence_length, window)


def head_flops_per_token(model: ModelConfig) -> int:
    """Return the product with the output head for one token, forward."""
    return 2 * model.vocab * model.hidden


def model_flops(model: ModelConfig, sequence_length: int, sequences: int) -> float:
    """Return the operations of forward and backward (three times forward) for some sequences, without recomputation.

    Attention counts what a causal mask leaves, so the figure is below those that count the full square
    (Chowdhery et al., arXiv 2204.02311, appendix B, gives the full-square form).
    """
    forward = sequence_length * head_flops_per_token(model)
    for layer in range(model.layers):
        forward += sequence_length * matmul_flops_per_token(model, layer)
        forward += attention_flops(model, layer, sequence_length)
    return 3.0 * forward * sequences
