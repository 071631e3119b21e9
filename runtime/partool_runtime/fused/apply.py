"""List of the fused parts, and their installation in a model."""

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
    """Make the loss use partool's kernels.

    Gradients are computed in the forward pass of the loss, except in schedules that hold several micro-batches between
    the last stage's forward and backward passes: each micro-batch would hold a gradient of the output matrix, so these
    schedules compute gradients in the backward pass. Where a schedule splits backward passes into input gradients and
    later weight gradients, the loss computes gradients in the backward pass by itself.
    """
    set_loss(model, kernels=LossKernels(how.mode, early=not how.several, vocabulary=how.model.vocab))


PARTS: MappingProxyType[Fused, Callable[[nn.Module, Fusing], None]] = MappingProxyType(
    # Before "norm": a rotation includes the norms of heads, unless these are already replaced.
    {"rope": fuse_rope, "norm": fuse_norms, "glu": fuse_glu, "loss": fuse_loss}
)
"""Functions that install the fused parts, by the part's name in ``kernels.fused``, in the order of application. The
optimizer is not a part of the model and is set separately."""


def fuse(model: nn.Module, plan: Plan) -> None:
    """Replace parts of a model, or of a rank's part of it, by the plan's kernels; no parameter is moved or copied."""
    put(model, Fusing.of(plan))


def put(model: nn.Module, how: Fusing) -> None:
    """Replace the parts named in ``how.parts`` by kernels; unlike :func:`fuse`, this function needs no plan."""
    for part, fuse_part in PARTS.items():
        if part in how.parts:
            fuse_part(model, how)
