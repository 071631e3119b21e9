"""Which parts there are, and what puts kernels in their place."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from torch import nn

from partool.plan.types import Plan
from partool.spec.training import Fused
from partool_runtime.fused.glu import fuse_glu
from partool_runtime.fused.norm import fuse_norms
from partool_runtime.fused.rope import fuse_rope
from partool_runtime.fused.types import Fusing
from partool_runtime.losses import set_loss
from partool_runtime.model.loss import LossKernels


def fuse_loss(model: nn.Module, how: Fusing) -> None:
    """Let the loss use kernels.

    Its gradients come with it, but for schedules that hold several micro-batches between forward and backward pass of
    the last stage: they would hold a gradient of the output matrix for each of them, so there it is computed in the
    backward pass. Schedules that halve backward passes do so by themselves.
    """
    set_loss(model, kernels=LossKernels(how.mode, early=not how.several, vocabulary=how.model.vocab))


PARTS: MappingProxyType[Fused, Callable[[nn.Module, Fusing], None]] = MappingProxyType(
    # A rotation takes norms of heads with it, as long as nothing else computes these.
    {"rope": fuse_rope, "norm": fuse_norms, "glu": fuse_glu, "loss": fuse_loss}
)
"""By their names in ``kernels.fused``, in the order in which they are put. The optimizer is none of the model's
parts, it is told by itself."""


def fuse(model: nn.Module, plan: Plan) -> None:
    """Put the plan's kernels in the place of parts of a model, or of a rank's part of it; nothing moves to or fro."""
    put(model, Fusing.of(plan))


def put(model: nn.Module, how: Fusing) -> None:
    """Do the same, with or without a plan."""
    for part, fuse_part in PARTS.items():
        if part in how.parts:
            fuse_part(model, how)
