"""Probability that a predicted peak stays under a device's memory."""

from __future__ import annotations

from math import erf, sqrt
from typing import Literal

import numpy as np

from partool.cost.case import Column

Verdict = Literal["green", "amber", "red"]
GREEN = 0.9
"""Minimum probability at which a layout is taken to fit. With the floor of 15 % for runs of a kind that has hardly been
measured, such a layout leaves 16 % of the device's memory free."""


def fit_probability(total_bytes: Column, sigma_bytes: Column, capacity_bytes: Column) -> Column:
    """Return the probability that the true peak stays under the capacity; the peak is taken as normally distributed."""
    z = (np.asarray(capacity_bytes) - total_bytes) / np.maximum(sigma_bytes, 1.0) / sqrt(2.0)
    if z.ndim == 0:
        return 0.5 * (1.0 + erf(float(z)))
    return 0.5 * (1.0 + _erf(z))


def verdict(probability: float) -> Verdict:
    """Return green for a probability of :data:`GREEN` or more, red for a probability below 0.5, else amber."""
    if probability >= GREEN:
        return "green"
    return "red" if probability < 0.5 else "amber"


def _erf(z: Column) -> Column:
    """Return the error function of ``z``, exact to 1.5e-7 (Abramowitz and Stegun, formula 7.1.26)."""
    t = 1.0 / (1.0 + 0.3275911 * np.abs(z))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(z) * (1.0 - series * np.exp(-z * z))
