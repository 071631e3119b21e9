"""Attention of some queries to some keys by the fastest kernel that returns the logarithm of the sum of exponentials.

``scaled_dot_product_attention`` does not return this logarithm, without which results over parts of the keys cannot be
merged; so the kernels that it uses are called by name. A backward pass gets the result and the logarithm over all keys,
and returns the exact gradients through the keys of the call, as in Liu et al. (arXiv 2310.01889). Keys have K heads.
Queries have N heads, a multiple of K. Queries and keys have width D; values may have another width V. Kernels for heads
of one width get heads that are padded with zeros to the larger width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_PADDED = 32
"""On CUDA the efficient kernel pads its logarithms to multiples of this many queries; the padding is infinite."""
_ALIGNED = 16
"""In biases for the efficient kernel, rows begin at multiples of this many elements."""


class Sight(NamedTuple):
    """Mask for the queries and keys of a kernel call; by default each query sees all keys."""

    causal: bool = False
    """The i-th query sees the first i keys; there are as many keys as queries."""
    mask: torch.Tensor | None = None
    """Boolean mask, ``[Q, K]`` or ``[B, 1, Q, K]``."""
    scale: float | None = None
    """Number by which products of queries and keys are multiplied; None means 1 / √D."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which partial results are merged and gradients summed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def forward(
    q_BNQD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, sight: Sight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result ``[B, N, Q, V]``, and the logarithm of the sum of exponentials ``[B, N, Q]`` in the wide type.

    For queries that see no key the result is 0 and the logarithm minus infinity. There is at least one head, one query
    and one key.
    """
    kernel = _kernel(q_BNQD, v_BKSD, sight)
    if kernel == "math":
        return _math(q_BNQD, k_BKSD, v_BKSD, sight)
    scale = _scale(q_BNQD, sight)
    if kernel == "efficient":
        k_BNSD, v_BNSD = (_copied(x_BKSD, q_BNQD.shape[1]) for x_BKSD in (k_BKSD, v_BKSD))
        out_BNQD, lse_BNQ = _aten._scaled_dot_product_efficient_attention(
            q_BNQD, k_BNSD, v_BNSD, _bias(sight, q_BNQD), True, 0.0, sight.causal, scale=scale
        )[:2]
        lse_BNQ = lse_BNQ[..., : q_BNQD.shape[2]]
    else:
        width = v_BKSD.shape[3]
        q_BNQD, k_BKSD, v_BKSD = _of_one_width(q_BNQD, k_BKSD, v_BKSD)
        if kernel == "cpu":
            out_BNQD, lse_BNQ = _aten._scaled_dot_product_flash_attention_for_cpu(
                q_BNQD, k_BKSD, v_BKSD, 0.0, sight.causal, attn_mask=_bias(sight, q_BNQD), scale=scale
            )
        else:
            out_BNQD, lse_BNQ = _aten._scaled_dot_product_flash_attention(
                q_BNQD, k_BKSD, v_BKSD, 0.0, sight.causal, scale=scale
            )[:2]
        out_BNQD = out_BNQD[..., :width]
    return (out_BNQD, lse_BNQ) if sight.mask is None else _of_none(out_BNQD, lse_BNQ, sight.mask)


def backward(
    grad_BNQD: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    sight: Sight,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values (the ``inputs``), summed over heads that share keys.

    ``results`` are the result ``[B, N, Q, V]`` and the logarithm ``[B, N, Q]`` over all keys.
    """
    (q_BNQD, k_BKSD, v_BKSD), (out_BNQD, lse_BNQ) = inputs, results
    kernel = _kernel(q_BNQD, v_BKSD, sight)
    if kernel == "math":
        return _math_backward(grad_BNQD, inputs, results, sight)
    lse_BNQ, scale = lse_BNQ.contiguous(), _scale(q_BNQD, sight)
    if kernel != "efficient":
        grad_BNQD, *padded, out_BNQD = _of_one_width(grad_BNQD, *inputs, out_BNQD)
        if kernel == "cpu":
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(grad_BNQD, *padded, out_BNQD, lse_BNQ, 0.0, sight.causal),
                attn_mask=_bias(sight, q_BNQD), scale=scale,
            )  # fmt: skip
        else:
            sizes = (None, None, q_BNQD.shape[2], k_BKSD.shape[2], 0.0, sight.causal)
            # Without dropout the random state is not read, but the arguments are required.
            state = q_BNQD.new_empty(2, dtype=torch.uint64), q_BNQD.new_empty(())
            grads = _aten._scaled_dot_product_flash_attention_backward(
                grad_BNQD, *padded, out_BNQD, lse_BNQ, *sizes, *state, scale=scale
            )
        width = q_BNQD.shape[3]
        return grads[0][..., :width], grads[1][..., :width], grads[2][..., : v_BKSD.shape[3]]
    heads = k_BKSD.shape[1]
    k_BNSD, v_BNSD = (_copied(x_BKSD, q_BNQD.shape[1]) for x_BKSD in (k_BKSD, v_BKSD))
    # Builds for ROCm take the logarithms as they are (aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    padding = 0 if torch.version.hip is not None else -lse_BNQ.shape[2] % _PADDED
    lse_BNP = F.pad(lse_BNQ, (0, padding), value=torch.inf)
    none = q_BNQD.new_empty((), dtype=torch.int64)
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        *(grad_BNQD, q_BNQD, k_BNSD, v_BNSD, _bias(sight, q_BNQD), out_BNQD, lse_BNP, none, none, 0.0),
        [True, True, True, False],
        sight.causal,
        scale=scale,
    )
    return grads[0], _added(grads[1], heads), _added(grads[2], heads)


def holds_scores(q_BNQD: torch.Tensor, v_BKSD: torch.Tensor) -> bool:
    """Return True if the kernel for these queries and values stores the scores of all pairs, even without a mask."""
    return _kernel(q_BNQD, v_BKSD, Sight()) == "math"


def _kernel(q_BNQD: torch.Tensor, v_BKSV: torch.Tensor, sight: Sight) -> Literal["cpu", "flash", "efficient", "math"]:
    device, widths = q_BNQD.device, (q_BNQD.shape[3], v_BKSV.shape[3])
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or q_BNQD.dtype == torch.float64 or any(width % 8 for width in widths):
        return "math"
    if sight.mask is not None or q_BNQD.dtype not in _HALF or max(widths) > 256:
        return "efficient"
    return "flash" if _has_flash(device) else "efficient"


@lru_cache
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _scale(q_BNQD: torch.Tensor, sight: Sight) -> float:
    return q_BNQD.shape[3] ** -0.5 if sight.scale is None else sight.scale


def _of_one_width(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors whose last dimension is padded with zeros to the largest of their widths."""
    widest = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == widest else F.pad(x, (0, widest - x.shape[3])) for x in tensors]


def _bias(sight: Sight, q_BNQD: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of ``sight`` as a bias on scores, aligned for GPU kernels; None if ``sight`` has no mask."""
    if sight.mask is None:
        return None
    mask = sight.mask if sight.mask.dim() == 4 else sight.mask[None, None]
    keys = mask.shape[3]
    bias = q_BNQD.new_zeros(*mask.shape[:3], keys + -keys % _ALIGNED)[..., :keys].masked_fill_(~mask, -torch.inf)
    return bias if q_BNQD.device.type == "cpu" else bias.expand(*q_BNQD.shape[:2], -1, -1)


def _of_none(out_BNQD: torch.Tensor, lse_BNQ: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the logarithm, set to 0 and to minus infinity for queries that see no key."""
    none = ~mask.any(dim=-1)  # [Q] or [B, 1, Q]
    return out_BNQD.masked_fill(none[..., None], 0), lse_BNQ.masked_fill(none, -torch.inf)


def _copied(x_BKSD: torch.Tensor, heads: int) -> torch.Tensor:
    return x_BKSD if x_BKSD.shape[1] == heads else x_BKSD.repeat_interleave(heads // x_BKSD.shape[1], dim=1)


def _added(grad_BNSD: torch.Tensor, heads: int) -> torch.Tensor:
    return grad_BNSD if grad_BNSD.shape[1] == heads else _grouped(grad_BNSD, heads).sum(dim=2)


def _grouped(x_BN: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a view ``[B, heads, N / heads, …]``; its third dimension numbers the query heads that share a key head."""
    return x_BN.reshape(x_BN.shape[0], heads, -1, *x_BN.shape[2:])


def _scores(q_BNQD: torch.Tensor, k_BKSD: torch.Tensor, sight: Sight) -> torch.Tensor:
    """Return the masked scores ``[B, K, N/K, Q, S]``, in float32 or wider; N/K query heads share a key head."""
    q_BKGQD = _grouped(q_BNQD.to(wide(q_BNQD.dtype)), k_BKSD.shape[1])
    scores: torch.Tensor = q_BKGQD @ k_BKSD.to(q_BKGQD.dtype)[:, :, None].mT * _scale(q_BNQD, sight)
    if sight.causal:
        below = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores.masked_fill_(~below, -torch.inf)
    if sight.mask is None:
        return scores
    return scores.masked_fill_(~(sight.mask if sight.mask.dim() == 2 else sight.mask[:, :, None]), -torch.inf)


def _math(
    q_BNQD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, sight: Sight
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q_BNQD, k_BKSD, sight)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    # For queries that see no key both are minus infinity, and the difference is NaN; other NaNs are kept.
    parts = (scores - lse).exp_().masked_fill_(lse == -torch.inf, 0)
    out = parts @ v_BKSD.to(parts.dtype)[:, :, None]
    return out.flatten(1, 2).to(q_BNQD.dtype), lse[..., 0].flatten(1, 2)


def _math_backward(
    grad_BNQD: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    sight: Sight,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (q_BNQD, k_BKSD, v_BKSD), (out_BNQD, lse_BNQ) = inputs, results
    scores = _scores(q_BNQD, k_BKSD, sight)
    type_, heads = scores.dtype, k_BKSD.shape[1]
    q, grad, out = (_grouped(x.to(type_), heads) for x in (q_BNQD, grad_BNQD, out_BNQD))
    parts = (scores - _grouped(lse_BNQ.to(type_), heads)[..., None]).exp_()
    dv_BKSD = (parts.mT @ grad).sum(dim=2)
    d_scores = parts * (grad @ v_BKSD.to(type_)[:, :, None].mT - (grad * out).sum(dim=-1, keepdim=True))
    d_scores *= _scale(q_BNQD, sight)
    dq_BNQD = (d_scores @ k_BKSD.to(type_)[:, :, None]).flatten(1, 2)
    dk_BKSD = (d_scores.mT @ q).sum(dim=2)
    return dq_BNQD, dk_BKSD, dv_BKSD
