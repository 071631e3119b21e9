"""The feed-forward network; it may have a gate (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from partool.spec.model import Activation, ModelConfig

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""Function of each activation; it is applied to the gate projection if there is one, else to the up projection."""


class FeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` with a gated activation, else ``down(act(up(x)))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gated = config.gated
        self.combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Function that computes act(gate) · up in one kernel; None means that torch computes it."""
        if config.gated:
            self.gate = nn.Linear(config.hidden, config.ffn_hidden, bias=config.ffn_bias)
        self.up = nn.Linear(config.hidden, config.ffn_hidden, bias=config.ffn_bias)
        self.down = nn.Linear(config.ffn_hidden, config.hidden, bias=config.ffn_bias)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Map ``[B, S, H]`` to ``[B, S, H]``."""
        first, *others = self.inputs(x_BSH)
        if others and self.combine is not None:
            return self.output(self.combine(first, others[0]))
        inner = self.activation(first)
        return self.output(inner * others[0] if others else inner)

    def inputs(self, x_BSH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return gate and up projections, or only up, ``[B, S, F]``; tensor parallelism replaces this method."""
        return (self.gate(x_BSH), self.up(x_BSH)) if self.gated else (self.up(x_BSH),)

    def output(self, inner_BSF: torch.Tensor) -> torch.Tensor:
        """Map ``[B, S, F]`` to ``[B, S, H]``; tensor parallelism replaces this method."""
        out: torch.Tensor = self.down(inner_BSF)
        return out
