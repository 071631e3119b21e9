"""Access to the loss: finds the module of a model, or of a rank's part of one, that computes it, to set options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def set_loss(model: nn.Module, **how: Any) -> None:
    """Give the model's loss keywords of :func:`partool_runtime.model.loss.loss`; nothing where the rank has none.

    The model's present loss function, of one rank or of tensor ranks, is kept, and from now on gets these keywords.
    """
    holder: Any = getattr(model, "loss_module", model)  # parts that WeiPipe runs by themselves have none
    if hasattr(holder, "loss"):
        before: Callable[..., Any] = holder.loss
        holder.loss = partial(before, **how)
