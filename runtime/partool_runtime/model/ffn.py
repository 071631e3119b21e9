"""The feed-forward network; it may have a gate (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from partool.spec.model import Activation, ModelConfig
from partool_runtime.model.around import Around
from partool_runtime.model.projection import SEPARATE, InputProducts, Linear, OutputProduct, alone

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
        self.inputs: InputProducts = SEPARATE
        """Multiplies by the gate and up projections, which share their input."""
        self.output: OutputProduct = alone
        """Multiplies by the down projection."""
        self.around: Around | None = None
        """Runs :meth:`compute`, for example for one tile of tokens after the other; None runs it once."""
        if config.gated:
            self.gate = Linear(config.hidden, config.ffn_hidden, bias=config.ffn_bias)
        self.up = Linear(config.hidden, config.ffn_hidden, bias=config.ffn_bias)
        self.down = Linear(config.ffn_hidden, config.hidden, bias=config.ffn_bias)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Map ``[B, S, H]`` to ``[B, S, H]``."""
        return self.compute(x_BSH) if self.around is None else self.around(self.compute, x_BSH)

    def compute(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Compute the network for the tokens of ``x_BSH``."""
        first, *others = self.inputs(x_BSH, (self.gate, self.up) if self.gated else (self.up,))
        if others and self.combine is not None:
            return self.output(self.combine(first, others[0]), self.down)
        inner = self.activation(first)
        return self.output(inner * others[0] if others else inner, self.down)
