"""Passes in which a reference goes over the same micro-batches before the model that is trained.

The reference is the model without its adapter, or a frozen copy of the starting weights
(``training.objective.reference``). It runs without gradients, over all micro-batches of a step or of a validation at
once, so that every schedule and every layout runs as in a validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from partool_runtime.data.batches import MicroBatch
from partool_runtime.parallel.passes import Passes, Timer
from partool_runtime.parallel.preferences import PreferenceLoss


class ReferencePasses:
    """Passes (``partool_runtime.parallel.passes.Passes``) after those of a reference.

    ``reference`` are the passes of the reference, ``recorder`` is their loss of pairs, and ``within`` returns the
    context in which they run. ``passes`` and ``preferences`` are those of the trained model.
    """

    def __init__(
        self,
        passes: Passes,
        preferences: PreferenceLoss,
        *,
        reference: Passes,
        recorder: PreferenceLoss,
        within: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._passes, self._preferences = passes, preferences
        self._reference, self._recorder, self._within = reference, recorder, within

    @property
    def trained(self) -> Passes:
        """The passes of the trained model."""
        return self._passes

    def step(self, batch: Sequence[MicroBatch], weight: torch.Tensor, timer: Timer) -> torch.Tensor:
        """See ``Passes``."""
        with timer("forward"):
            self._refer(batch, lambda: False)
        return self._passes.step(batch, weight, timer)

    def evaluate(self, batches: Iterable[MicroBatch], stopping: Callable[[], bool]) -> torch.Tensor | None:
        """See ``Passes``."""
        micro_batches = list(batches)
        if not self._refer(micro_batches, stopping):
            return None
        return self._passes.evaluate(micro_batches, stopping)

    def _refer(self, batch: Sequence[MicroBatch], stopping: Callable[[], bool]) -> bool:
        """Compute the reference's log-probabilities of micro-batches; return False if ``stopping`` ended it."""
        self._recorder.record()
        with self._within():
            ended = self._reference.evaluate(batch, stopping) is not None
        self._preferences.refer(self._recorder.passed())
        return ended

    def close(self) -> None:
        """See ``Passes``."""
        if self._reference is not self._passes:
            self._reference.close()
        self._passes.close()
