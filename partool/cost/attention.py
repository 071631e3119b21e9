"""Seconds of attention's core (scores and values), and of what sequence parallelism sends for it."""

from __future__ import annotations

import numpy as np

from partool.cost import collective, cut
from partool.cost.case import Column, Job, Layouts
from partool.cost.gemm import matmul_s

_FLASH_SHARE = {"cpu": 0.35, "cuda": 0.50, "rocm": 0.35}
"""Of the peak (of the achievable rate on a CPU) that fused attention reaches, both passes together, where the machine
gives no figure."""
_GENERATIONS = {
    "flash1": (0.70, 200e12, False),
    "flash2": (1.0, 350e12, True),
    "flash3": (1.0, float("inf"), True),
}
"""Share of the best rate, limit in FLOP/s, and whether heads of 128 are faster than of 64. FlashAttention-2 is 1.5 to 2
times as fast as its predecessor (arXiv 2307.08691) and reaches about 350e12 on Hopper, whose asynchronous tensor cores
it does not use (arXiv 2407.08608, section 1)."""
_START_S = 5e-6
_BACKWARD = 2.5
"""Fused backward against forward: five products instead of two."""
_SCORE_BYTES_FORWARD, _SCORE_BYTES_BACKWARD = 16.0, 16.0
"""Memory traffic per score of unfused attention: scores, scaled and masked softmax, dropout with its mask and the read
by the second product; backward the same again with gradients."""


def keys_seen(length: int, window: int | None) -> float:
    """Return how many keys a causal query sees on average, in a window or in all of the sequence."""
    if window is None or window >= length:
        return length / 2.0
    return window - window * window / (2.0 * length)


def widths(job: Job, layouts: Layouts) -> tuple[Column, Column, Column]:
    """Return the widths per token of queries, of keys and of values over the heads of one tensor rank."""
    model = job.model
    queries, keys = cut.heads(model, layouts.tp)
    if model.mla:
        query = queries * (model.mla.nope_head_dim + model.mla.rope_head_dim)
        return query, query, queries * model.mla.v_head_dim
    return queries * model.head_dim, keys * model.head_dim, keys * model.head_dim


def attention_s(job: Job, layouts: Layouts, window: int | None, *, backward: bool) -> Column:
    """Return the seconds of scores and values of one layer for one micro-batch on one rank."""
    rows = layouts.micro_batch * job.sequence_length / layouts.cp
    queries, _ = cut.heads(job.model, layouts.tp)
    query, _, _ = widths(job, layouts)
    value = queries * (job.model.mla.v_head_dim if job.model.mla else job.model.head_dim)
    if job.stack.attention == "unfused":
        return _unfused_s(job, layouts, rows, backward=backward)
    flops = 2.0 * rows * keys_seen(job.sequence_length, window) * (query + value)
    devices = job.devices
    rate = devices.attention_flops or _FLASH_SHARE[devices.backend] * _peak(job)
    share, limit, wide_heads = _GENERATIONS[job.stack.attention]
    rate = min(share * rate, limit) * (_head_share(job.model.head_dim) if wide_heads else 1.0)
    if not job.stack.ring_balanced:
        # The last rank sees all keys before its own tokens, half a share more than twice the mean.
        flops = flops * np.where(layouts.sequence_method == 1, (2.0 * layouts.cp - 1.0) / layouts.cp, 1.0)
    return flops * (_BACKWARD if backward else 1.0) / rate + _START_S


def _peak(job: Job) -> float:
    devices = job.devices
    return devices.achievable_flops if devices.backend == "cpu" else devices.peak_flops or devices.achievable_flops


def _head_share(head_dim: int) -> float:
    """Return how fast narrow heads are against 128: less work per element of the softmax."""
    return 1.0 if head_dim >= 128 else 0.85 if head_dim >= 96 else 0.70


def _unfused_s(job: Job, layouts: Layouts, rows: Column, *, backward: bool) -> Column:
    """Return the seconds of batched products over all pairs, masked or not, and the scores' way through memory."""
    model, length = job.model, job.sequence_length
    queries, _ = cut.heads(model, layouts.tp)
    heads = layouts.micro_batch * queries / layouts.cp
    both = matmul_s(job, length, length, model.head_dim, batch=heads, wide=True) + matmul_s(
        job, length, model.head_dim, length, batch=heads, wide=True
    )
    scores = rows * length * queries
    passes = _SCORE_BYTES_BACKWARD if backward else _SCORE_BYTES_FORWARD
    return (2.0 if backward else 1.0) * both + scores * passes * job.compute_bytes / 2 / (
        0.80 * job.devices.memory_bytes_per_s
    )


def extra_operators(job: Job, layouts: Layouts) -> Column:
    """Return the factor on a layer's operators where unfused attention's softmax has no kernel of its own.

    Megatron's masked softmax works on groups of four heads and samples; other shapes take a chain of small kernels
    (``FusedScaleMaskSoftmax`` in https://github.com/NVIDIA/Megatron-LM).
    """
    if job.stack.attention != "unfused":
        return 1.0
    rows = layouts.micro_batch * cut.heads(job.model, layouts.tp)[0]
    return np.where(np.mod(rows, 4) == 0, 1.0, 1.35)


def sequence_s(job: Job, layouts: Layouts, window: int | None, *, backward: bool) -> Column:
    """Return the seconds that sequence parallelism communicates per layer and pass.

    Ulysses (arXiv 2309.14509): all-to-alls of queries, keys, values and the result. Ring (arXiv 2310.01889): keys and
    values go once around, in the backward pass with their gradients; a window needs its neighbours' tokens only.
    """
    model = job.model
    rows = layouts.micro_batch * job.sequence_length / layouts.cp
    query, keys, values = widths(job, layouts)
    ranks = collective.axis_group(job, layouts, "cp")
    parts = [query, keys, values, values if model.mla else query]
    ulysses = sum(collective.all_to_all_s(job, rows * part * job.compute_bytes, ranks) for part in parts)
    share = 1.0 if window is None else min(1.0, window / job.sequence_length + 1e-9)
    steps = np.maximum(np.ceil((layouts.cp - 1) * share), 0)
    block = 2.0 * rows * keys * job.compute_bytes * (2.0 if backward else 1.0)
    ring = steps * (collective.latency(job, ranks) + block / collective.rate(job, ranks))
    return np.where(layouts.cp > 1, np.where(layouts.sequence_method == 0, ulysses, ring), 0.0)


def hidden_s(layouts: Layouts, attention_s: Column, sequence_s: Column) -> Column:
    """Return how much of that a pass hides: a ring sends the next block while it works on this one."""
    blocks = np.maximum(layouts.cp - 1, 1) / np.maximum(layouts.cp, 1)
    return np.where(layouts.sequence_method == 1, np.minimum(sequence_s, 0.9 * blocks * attention_s), 0.0)
