"""The loss: cross entropy whose gradient takes the place of the logits, chunk by chunk behind the output matrix."""

from __future__ import annotations

from torch import nn

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
