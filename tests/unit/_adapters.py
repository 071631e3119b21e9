"""A toy adapter, which wraps a projection."""

from __future__ import annotations

import torch
from torch import nn

from partool_runtime.model.projection import Linear

FACTOR = 3.0


class Scaled(nn.Module):
    """A toy adapter: :data:`FACTOR` times the product of the projection that it wraps."""

    matrix: torch.Tensor | None = None

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def product(self, x: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        out = FACTOR * self.base.product(x, biased=False)
        return out if self.bias is None or not biased else out + self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)
