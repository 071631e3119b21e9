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
    put_around_loss(model, lambda before: partial(before, **how))


def put_around_loss(model: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the model's loss function by what ``around`` returns for it; no effect on ranks without a loss."""
    holder: Any = getattr(model, "loss_module", model)  # model parts that WeiPipe runs separately have no loss_module
    if hasattr(holder, "loss"):
        holder.loss = around(holder.loss)
