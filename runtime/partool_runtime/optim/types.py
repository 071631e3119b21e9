"""Interface of optimizers, independent of where the state is and when updates are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, Protocol, TypedDict

import torch

from partool_runtime.optim.average import MovingAverage
from partool_runtime.optim.grad_norm import LocalSums, Mode
from partool_runtime.pieces import Value


class OptimizerNumbers(TypedDict):
    """Numbers that checkpoints hold beside an optimizer's state."""

    updates: int
    """See :attr:`Optimizer.updates`."""
    variance_updates: NotRequired[int]
    """Updates of the second moments, of optimizers that exchange one bit per element."""
    exchange_ranks: NotRequired[int]
    """Ranks of their exchange, each of which keeps errors."""


class Optimizer(Protocol):
    """Owns master weights and moments. A step is ``begin``, the passes, ``sums``, and then ``step`` or ``skip``."""

    term: str
    """Time term, a key of ``TIME_TERMS``, for the time in ``sums``, ``step`` and ``skip``."""
    notes: tuple[str, ...]
    """Notes for the user, shown when training begins."""
    updates: int
    """Number of steps made, without skipped steps."""
    average: MovingAverage | None
    """The average of the weights, which :meth:`step` updates; None without one."""

    def begin(self, lr: float, scale: float) -> None:
        """Drop all gradients and prepare for a step, whose :meth:`step` is expected to get the same arguments."""

    def sums(self, mode: Mode) -> LocalSums:
        """Return the sums over the step's unscaled gradients that this rank counts."""

    def step(self, lr: float, scale: float) -> None:
        """Update with gradients times ``scale``."""

    def skip(self) -> None:
        """Drop the step: parameters and state stay as they were before :meth:`begin`."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the live tensors of the moments by ``<kind>.<parameter>``; each has its parameter's placement."""

    def placed_state(self) -> dict[str, Value]:
        """Return further live tensors by ``<kind>.<parameter>``, each with a place of its own."""

    def numbers(self) -> OptimizerNumbers:
        """Return the numbers that checkpoints hold beside the state, such as ``updates``."""

    def expect(self, numbers: OptimizerNumbers) -> dict[str, Value]:
        """Take the numbers of a checkpoint whose tensors are then loaded, before :meth:`loaded`.

        Return values to fill instead of those of :meth:`placed_state` with the same names.
        """

    def masters(self) -> Mapping[str, torch.Tensor]:
        """Return the master weights by parameter, if they differ from the weights that compute reads."""

    def settle(self) -> None:
        """Bring the tensors that :meth:`state` and :meth:`masters` return up to date; call it before they are read."""

    def loaded(self) -> None:
        """Apply values that were written to masters and state when a run was resumed or started."""

    def state_bytes(self) -> int:
        """Return the bytes of masters and moments on the device of compute."""

    def gradient_bytes(self) -> int:
        """Return the bytes of gradients that the optimizer itself holds on compute's device, excluding ``grad``."""

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of host memory that the rank holds, by keys of :data:`partool.plan.terms.HOST_TERMS`."""

    def report(self) -> dict[str, float]:
        """Return counters of work in the background; empty for an optimizer without such work."""

    def close(self) -> None:
        """End background threads."""


class CountsUpdates:
    """What checkpoints hold of an optimizer beside its moments: the number of updates, and nothing with a place."""

    updates = 0
    """See :class:`Optimizer`."""
    average: MovingAverage | None = None
    """See :class:`Optimizer`."""

    def placed_state(self) -> dict[str, Value]:
        """See :class:`Optimizer`."""
        return {}

    def numbers(self) -> OptimizerNumbers:
        """See :class:`Optimizer`."""
        return {"updates": self.updates}

    def expect(self, numbers: OptimizerNumbers) -> dict[str, Value]:
        """See :class:`Optimizer`."""
        self.updates = numbers["updates"]
        return {}
