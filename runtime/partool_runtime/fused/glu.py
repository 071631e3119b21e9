"""Gated networks whose activation and product run in one kernel, which saves only its two inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from partool_kernels.glu.op import glu
from partool_runtime.fused.types import Fusing
from partool_runtime.model.ffn import FeedForward
from partool_runtime.model.moe import Experts

KINDS = {"swiglu": "silu", "geglu": "gelu"}


def fuse_glu(model: nn.Module, how: Fusing) -> None:
    """Make every gated network use the kernel."""
    if how.model.activation in KINDS:
        combine = _combine(KINDS[how.model.activation], how.mode)
        for module in model.modules():
            if isinstance(module, FeedForward | Experts):
                module.combine = combine


# One function for all layers, and not a partial: torch.compile would recompile layers for each new function.
def _combine(kind: str, mode: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def combine(gate_BSF: torch.Tensor, up_BSF: torch.Tensor) -> torch.Tensor:
        return glu(gate_BSF, up_BSF, kind, mode)

    return combine
