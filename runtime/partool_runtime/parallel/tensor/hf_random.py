"""Random numbers for dropout on tensor ranks, in models that transformers builds."""

from __future__ import annotations

import torch

_ODD = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: a multiplier that makes seeds of neighbouring ranks differ widely."""


class Random:
    """Random numbers of tensor ranks: equal for activations that all ranks hold, different for cut activations.

    Between a matrix cut by outputs and the next matrix cut by inputs, a rank holds its own part of the activations. For
    this part the rank draws a seed from the common generator state. Recomputation restores the common state, and so
    draws the same seed.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def enter(self) -> None:
        """Switch to the random numbers of this rank; do nothing if they are already in use."""
        if self._before is not None or not torch.is_grad_enabled():
            return
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._before = torch.get_rng_state(), cuda
        torch.manual_seed((seed + self._rank * _ODD) % 2**63)

    def leave(self) -> None:
        """Switch back to the random numbers common to all ranks."""
        if self._before is None:
            return
        torch.set_rng_state(self._before[0])
        if self._before[1] is not None:
            torch.cuda.set_rng_state(self._before[1])
        self._before = None
