"""Stages whose weight gradients can wait for the second half of their backward pass."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from partool_runtime import deferral


def split_linears(module: nn.Module) -> None:
    """Let every ``nn.Linear`` under a module put its gradients off; a second call changes nothing.

    What else has weights (norms, embeddings) has its gradients in the first half: they are cheap. Such a module cannot
    be compiled as a whole: a graph has no halves.
    """
    for child in module.modules():
        if (
            isinstance(child, nn.Linear)
            and type(child).forward is nn.Linear.forward
            and "forward" not in child.__dict__
        ):
            setattr(child, "forward", partial(_forward, child))  # noqa: B010 - mypy forbids assigning a method


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return deferral.linear(x, module.weight, module.bias)
