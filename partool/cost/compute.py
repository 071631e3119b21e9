"""Arithmetic and memory traffic of the decoder, in FLOPs and seconds."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from partool.cost.activations import attention_widths, ffn_width
from partool.cost.work import Work
from partool.layout.parameters import parameters
from partool.spec.model import ModelConfig

_ATTENTION_EFFICIENCY = {"cpu": 0.35, "cuda": 0.45, "rocm": 0.35}
"""Of the device's peak (of the achievable rate on a CPU): 0.50 on A100, 0.45 on H100 with flash attention 2."""
_OPERATOR_S = {"cpu": 8e-6, "cuda": 7e-6, "rocm": 8e-6}
"""Host time per operator without graphs: 6 to 8 us per kernel launch; about the same for a CPU operator."""
_OPERATORS_PER_LAYER: dict[Pass, int] = {"forward": 45, "backward": 95}
Pass = Literal["forward", "backward"]


def matmul_flops_per_token(work: Work) -> float:
    """Return the forward FLOPs of matrix products per token: 2 per weight; experts by their share, embeddings none."""
    return _matmul_flops(work.model)


@lru_cache(maxsize=8)
def _matmul_flops(model: ModelConfig) -> float:
    total = 2.0 * model.vocab * model.hidden if model.tied_embeddings else 0.0
    for info in parameters(model):
        if info.kind in ("embedding", "position", "norm") or len(info.shape) < 2:
            continue
        share = model.moe.top_k / model.moe.experts if info.kind == "expert" and model.moe is not None else 1.0
        total += 2.0 * share * info.elements
    return total


def attention_flops_per_token(work: Work) -> float:
    """Return the forward FLOPs of attention scores and values per token, causal or in a window."""
    model, length = work.model, work.training.sequence_length
    width = model.heads * model.head_dim
    total = 0.0
    for layer in range(model.layers):
        window = model.window if model.attention_kind(layer) == "sliding" and model.window else length
        seen = min(window, length)
        # A causal row sees half the sequence on average; a window is full once the row is past it.
        average = seen / 2 if seen == length else seen - seen * seen / (2 * length)
        total += 4.0 * average * width
    return total


def model_flops(work: Work) -> float:
    """Return the FLOPs of one optimizer step over all ranks, backward counted twice the forward, nothing recomputed."""
    tokens = work.training.global_batch * work.training.sequence_length
    return 3.0 * tokens * (matmul_flops_per_token(work) + attention_flops_per_token(work))


def forward_s(work: Work) -> float:
    """Return the seconds of one forward pass of one micro-batch on the fullest stage."""
    return _pass_s(work, "forward", 1.0)


def backward_s(work: Work) -> float:
    """Return the seconds of one backward pass of one micro-batch, recomputation included."""
    return _pass_s(work, "backward", 2.0) + _recompute_s(work)


def _pass_s(work: Work, which: Pass, factor: float) -> float:
    devices, mesh = work.devices, work.layout.mesh
    share = work.tokens_per_micro_batch / mesh.tp / mesh.pp
    matmul = factor * share * matmul_flops_per_token(work) / devices.achievable_flops
    rate = devices.achievable_flops if devices.backend == "cpu" else devices.peak_flops or devices.achievable_flops
    attention = factor * 1.25 ** (which == "backward") * share * attention_flops_per_token(work)
    attention /= rate * _ATTENTION_EFFICIENCY[devices.backend]
    layers = work.model.layers / mesh.pp
    moved = sum(elementwise_bytes(work, which, layer) for layer in range(work.model.layers)) / mesh.pp
    # The loss: logits are written, normalised and read again in fp32 or wider.
    moved += 3.0 * work.tokens_per_micro_batch * work.model.vocab * max(work.compute_bytes, 4) / mesh.tp
    host = layers * _OPERATORS_PER_LAYER[which] * _OPERATOR_S[devices.backend]
    device = matmul + attention + moved / devices.memory_bytes_per_s
    # A CPU rank does the host's work on the same core; an accelerator runs beside its host.
    return device + host if devices.backend == "cpu" else max(device, host)


def elementwise_bytes(work: Work, which: Pass, layer: int) -> float:
    """Return the bytes that one layer's element-wise operators read and write in one pass over a micro-batch.

    Counted per operator of the decoder (a product reads two and writes one). Compiled, each chain is one kernel that
    reads its inputs and writes its result; not compiled, norms and rotations work in fp32 or wider.
    """
    model, tensor = work.model, work.layout.mesh.tp
    forward = which == "forward"
    query, key, value, out = (width / tensor for width in attention_widths(work))
    inner, hidden = ffn_width(work, layer) / tensor, float(model.hidden)
    rotated = query + key if model.position == "rope" else 0.0
    attention = (query + key + value + out) * (1 if forward else 2)
    residual = 6 * hidden if forward else 6 * hidden + 9 * hidden  # also the sums of q, k, v's and gate, up's gradients
    if work.layout.compile == "block":
        norms, turns, gates = (6, 2, 3) if forward else (16, 2, 5)
        elements = norms * hidden + turns * rotated + attention + gates * inner
        return elements * work.tokens_per_micro_batch * work.compute_bytes
    wide = max(work.compute_bytes, 4)
    fused = model.norm == "layernorm"
    norms = (4 if fused else 14) if forward else (10 if fused else 38)
    turns = 10 if forward else 12
    gates = (5 if forward else 9) if model.gated else (2 if forward else 3)
    narrow = residual + attention + gates * inner
    return work.tokens_per_micro_batch * (wide * (norms * hidden + turns * rotated) + work.compute_bytes * narrow)


def _recompute_s(work: Work) -> float:
    again = {"none": 0.0, "selective": 0.25, "full": 1.0}
    share = sum(again[policy] for policy in work.layout.recompute) / len(work.layout.recompute)
    return share * forward_s(work)


def optimizer_s(work: Work, elements: float) -> float:
    """Return the seconds of norm, clipping and AdamW over ``elements`` parameters of a rank.

    AdamW reads weight, gradient and two moments and writes three of them back; the norm reads the gradient once more.
    """
    return 8.0 * work.master_bytes * elements / work.devices.memory_bytes_per_s + 50e-6
