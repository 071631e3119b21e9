"""The embedding of tokens or positions, whose rows several ranks may hold."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Lookup(Protocol):
    """How rows of an embedding are looked up where ranks hold some of them, or embed some of the tokens."""

    def __call__(self, embed: nn.Embedding, index: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the rows with the numbers ``index``, ``[..., H]``."""


class Embedding(nn.Embedding):
    """A table of vectors, one per token or position."""

    lookup: Lookup | None = None
    """How rows are looked up; None means that this rank holds them all. Tensor parallelism sets it."""

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Return the rows with the numbers ``index``, ``[..., H]``."""
        return super().forward(index) if self.lookup is None else self.lookup(self, index)
