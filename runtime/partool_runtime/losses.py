"""Sets options of the loss on the module that computes the loss in a model or in a rank's part of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def set_loss(model: nn.Module, **how: Any) -> None:
    """Bind keywords of :func:`partool_runtime.model.loss.loss` to the model's loss; no effect on ranks without a loss.

    The model keeps its loss function (for one rank or for tensor ranks), which gets these keywords in every call.
    """
    holder: Any = getattr(model, "loss_module", model)  # model parts that WeiPipe runs separately have no loss_module
    if hasattr(holder, "loss"):
        before: Callable[..., Any] = holder.loss
        holder.loss = partial(before, **how)
