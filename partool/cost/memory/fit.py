"""Probability that a predicted peak of memory fits into a device: one function of the peak, its error and the device.

Closed equations of many layouts, the exact prediction of one layout and dry runs all use :func:`fit_probability`.
"""

from __future__ import annotations

from math import sqrt
from typing import Literal

import numpy as np

from partool.cost.case import Column

Verdict = Literal["green", "amber", "red"]
GREEN = 0.9
"""Minimum probability at which a layout is taken to fit. With the floor of 15 % for runs of a kind that has hardly been
measured, such a layout leaves 16 % of the device's memory free."""


def fit_probability(total_bytes: Column, sigma_bytes: Column, capacity_bytes: Column) -> Column:
    """Return the probability that the true peak stays under the capacity: Φ((capacity − total) / σ).

    ``total_bytes`` are the predicted peak. ``sigma_bytes`` are what five in six runs exceed it by at most
    (:func:`partool.cost.evidence.memory_error`), which is one standard deviation of a normal distribution. Neither of
    them may depend on ``capacity_bytes``, all the memory of the device without a headroom: then the probability never
    falls as the capacity grows. It is one number where all arguments are.
    """
    z = (np.asarray(capacity_bytes) - total_bytes) / np.maximum(sigma_bytes, 1.0) / sqrt(2.0)
    probability = np.asarray(0.5 * (1.0 + _erf(z)))
    return float(probability) if probability.ndim == 0 else probability


def verdict(probability: float) -> Verdict:
    """Return green for a probability of :data:`GREEN` or more, red for a probability below 0.5, else amber."""
    if probability >= GREEN:
        return "green"
    return "red" if probability < 0.5 else "amber"


def _erf(z: Column) -> Column:
    """Return the error function of ``z``, exact to 1.5e-7 (Abramowitz and Stegun, formula 7.1.26), never falling."""
    t = 1.0 / (1.0 + 0.3275911 * np.abs(z))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(z) * (1.0 - series * np.exp(-z * z))
