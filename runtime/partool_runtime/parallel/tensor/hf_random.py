"""Dropout of models that transformers builds, on tensor ranks."""

from __future__ import annotations

import torch

_ODD = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: seeds of neighbouring ranks are far apart."""


class Random:
    """Random numbers of tensor ranks: the same where all hold the same, others where each has its part.

    Between a matrix cut by outputs and the next one cut by inputs a rank holds its own part of the activations; there
    it draws from a seed that is drawn from the common state, so that recomputation, which sets that back, repeats it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def enter(self) -> None:
        """Begin to draw numbers of this rank's own, unless it does."""
        if self._before is not None or not torch.is_grad_enabled():
            return
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._before = torch.get_rng_state(), cuda
        torch.manual_seed((seed + self._rank * _ODD) % 2**63)

    def leave(self) -> None:
        """Draw what all ranks draw again."""
        if self._before is None:
            return
        torch.set_rng_state(self._before[0])
        if self._before[1] is not None:
            torch.cuda.set_rng_state(self._before[1])
        self._before = None
