"""Gated networks: the activation of the gate and the product with it in one kernel, nothing kept but both."""

from __future__ import annotations

from functools import partial

from torch import nn

from partool_kernels.glu.op import glu
from partool_runtime.fused.types import Fusing
from partool_runtime.model.ffn import FeedForward

KINDS = {"swiglu": "silu", "geglu": "gelu"}


def fuse_glu(model: nn.Module, how: Fusing) -> None:
    """Let every gated network use it."""
    kind = KINDS[how.model.activation]
    for module in model.modules():
        if isinstance(module, FeedForward) and module.gated:
            module.combine = partial(glu, kind=kind, mode=how.mode)
