"""The ``training.ema`` section: an average of the weights beside them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from partool.spec._base import Section

_FIRST, _SHORTEST = 1.0, 10.0
"""With a warm-up, n updates have the decay (1 + n) / (10 + n) at most, as in TensorFlow's ExponentialMovingAverage."""


class EmaSpec(Section):
    """The exponential moving average of the trained weights, in the type of the master weights."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Share of the average that stays in each step: average = decay · average + (1 − decay) · weights."""
    warm_up: bool = False
    """True: after n updates the decay is (1 + n) / (10 + n) at most, so that the first weights count less."""
    validation: Literal["average", "weights", "both"] = "average"
    """Weights that validations compute the loss of; both: first the average, whose figures count, then the weights."""

    def decay_at(self, updates: int) -> float:
        """Return the decay after the ``updates``-th update of the weights, counted from 1."""
        return min(self.decay, (_FIRST + updates) / (_SHORTEST + updates)) if self.warm_up else self.decay
