"""The feed-forward network; it may have a gate (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from partool.spec.model import Activation, ModelConfig
from partool_runtime.model.around import Around
from partool_runtime.model.clamped import ClampedGate
from partool_runtime.model.projection import SEPARATE, InputProducts, Linear, OutputProduct, alone

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "swiglu_clamped": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""Function of each activation; it is applied to the gate projection if there is one, else to the up projection.

The clamped gate is no such product: :func:`combined` has its function.
"""
Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of gate and up projections, ``[..., F]``."""


def combined(config: ModelConfig) -> Combine | None:
    """Return the function that computes an activation of both inputs at once; None if it is act(gate) · up."""
    return ClampedGate(config) if config.activation == "swiglu_clamped" else None


class FeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` with a gated activation, else ``down(act(up(x)))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gated = config.gated
        self.combine: Combine | None = combined(config)
        """Function that computes the activation of gate and up at once; None means act(gate) · up by torch."""
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
