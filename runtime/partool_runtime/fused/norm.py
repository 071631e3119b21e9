"""Norms in one kernel each, fused with the preceding residual sum where a layer supports it."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import nn

from partool_kernels.norm.op import Norm, add_norm, norm
from partool_runtime.fused.types import Fusing
from partool_runtime.hf.patches import has_patched_forward
from partool_runtime.model.decoder import Block
from partool_runtime.model.norm import LayerNorm, NormFunction, RMSNorm, as_own


def fuse_norms(model: nn.Module, how: Fusing) -> None:
    """Make every norm over a whole width use the kernel, in place.

    Norms whose width is cut over ranks (in two-dimensional tensor parallelism) stay unchanged, since they exchange
    statistics in the middle of the computation. A norm whose parameters are gathered separately is not fused with the
    residual sum, since the gather happens when the norm is called.
    """
    mode, by = how.mode, _alone(how.mode)
    for name, module in model.named_modules():
        apart = any(fnmatchcase(f"{name}.ffn_norm", pattern) for pattern in how.leaves)
        if isinstance(module, Block) and _is_fit(module.ffn_norm) and not apart:
            module.add_norm = _with_sum(as_own(module.ffn_norm), mode)
    for module in model.modules():
        if _is_fit(module):
            as_own(module).by = by


def _is_fit(module: nn.Module) -> bool:
    if has_patched_forward(module) or getattr(module, "by", None) is not None:
        return False
    if type(module) in (nn.LayerNorm, LayerNorm):
        layer = cast(nn.LayerNorm, module)
        return len(layer.normalized_shape) == 1 and layer.elementwise_affine
    return type(module) is RMSNorm


def _how(norm: RMSNorm | LayerNorm) -> Norm:
    """Return the norm's description with its current parameters, which may be gathered or received."""
    if isinstance(norm, LayerNorm):
        return Norm("layer", norm.eps, norm.weight, cast("torch.Tensor | None", norm.bias))
    return Norm("rms", norm.eps, norm.weight)


# A function, as torch.compile treats each partial as a different function, and recompiles layers until it gives up.
def _alone(mode: str) -> NormFunction:
    def by(module: RMSNorm | LayerNorm, x: torch.Tensor, /) -> torch.Tensor:
        how = _how(module)
        # Where parameters stay in float32, types are mixed, and torch's own norm determines the result's type.
        return norm(x, how, mode) if how.weight.dtype == x.dtype else module.plain(x)

    return by


def _with_sum(
    module: RMSNorm | LayerNorm, mode: str
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def both(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        how = _how(module)
        if how.weight.dtype == x.dtype == residual.dtype:
            return add_norm(x, residual, how, mode)
        total = x + residual
        return total, module.plain(total)

    return both
