"""What training asks of an optimizer, wherever its state is and whenever it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from partool_runtime.optim.grad_norm import LocalSums, Mode


class Optimizer(Protocol):
    """Owns masters and moments. A step is ``begin``, the passes, ``sums``, and then ``step`` or ``skip``."""

    term: str
    """Time term, a key of ``TIME_TERMS``, for the time in ``sums``, ``step`` and ``skip``."""
    notes: tuple[str, ...]
    """Notes for the user as training begins."""
    updates: int
    """Steps made, skipped ones not counted; checkpoints hold it."""

    def begin(self, lr: float, scale: float) -> None:
        """Drop all gradients and get ready for those of a step that is expected to follow with these arguments."""

    def sums(self, mode: Mode) -> LocalSums:
        """Return what this rank counts of the step's gradients, as they came."""

    def step(self, lr: float, scale: float) -> None:
        """Update with gradients times ``scale``."""

    def skip(self) -> None:
        """Leave everything as it was before :meth:`begin`."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the moments as ``<kind>.<parameter>``, the live tensors, each placed as its parameter is."""

    def masters(self) -> Mapping[str, torch.Tensor]:
        """Return the weights that are trained, by parameter, where these are others than compute reads."""

    def settle(self) -> None:
        """Make what :meth:`state` and :meth:`masters` return current, before it is read."""

    def loaded(self) -> None:
        """Take in what was written to masters and state: a resumed or a new run's."""

    def state_bytes(self) -> int:
        """Return the bytes of masters and moments that are where compute is."""

    def gradient_bytes(self) -> int:
        """Return the bytes of gradients that it holds where compute is, besides those of the parameters."""

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of the rank's host memory by keys of :data:`partool.plan.terms.HOST_TERMS`."""

    def report(self) -> dict[str, float]:
        """Return what it counted beside the passes; empty where it does not work beside them."""

    def close(self) -> None:
        """End what works beside training."""
