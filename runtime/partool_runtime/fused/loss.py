"""The loss: cross entropy whose gradient takes the place of the logits, chunk by chunk behind the output matrix."""

from __future__ import annotations

from torch import nn

from partool_runtime.fused.types import Fusing
from partool_runtime.losses import set_loss
from partool_runtime.model.loss import LossKernels


def fuse_loss(model: nn.Module, how: Fusing) -> None:
    """Let the loss use kernels.

    Gradients of the output matrix come with the loss where nothing else runs between a micro-batch's forward and
    backward pass; pipelines, where several micro-batches may be on their way at once, would hold one for each of them,
    so there it is computed in the backward pass.
    """
    set_loss(model, kernels=LossKernels(how.mode, early=not how.pipelined, vocabulary=how.model.vocab))
