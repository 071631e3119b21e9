"""What training asks of an optimizer, wherever its state is and whenever it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from partool_runtime.optim.grad_norm import LocalSums, Mode


class Optimizer(Protocol):
    """Owns masters and moments. A step is ``begin``, the passes, ``sums``, and then ``step`` or ``skip``."""

    beside: bool
    """Whether it works beside the passes: then its time is what is waited for in ``sums``, ``step`` and ``skip``."""
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

    def close(self) -> None:
        """End what works beside training."""
