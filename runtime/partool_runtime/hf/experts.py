"""Chooses how transformers computes experts whose matrices are stacked in one tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

from torch import nn

_ALIGNED = 8
"""Widths in torch's grouped products must be multiples of this number, so that two-byte elements fill 16 bytes."""


def plain_experts(causal: nn.Module, wide: bool) -> None:
    """Make experts compute one after the other in float64 (``wide``) and for widths that grouped products reject."""
    if wide and hasattr(causal, "set_experts_implementation"):
        cast(Any, causal).set_experts_implementation("eager")
    for module in causal.modules():
        plain_where_odd(module, (parameter.shape for parameter in module._parameters.values() if parameter is not None))


def plain_where_odd(module: nn.Module, shapes: Iterable[tuple[int, ...]]) -> None:
    """Make a module compute expert by expert if grouped products reject one of ``shapes``, the parameters' shapes.

    Backward passes use the transposed matrices, so both widths of a matrix must be aligned.
    """
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) is None:
        return
    if any(width % _ALIGNED for shape in shapes if len(shape) == 3 for width in shape[1:]):
        own = copy.copy(config)
        own._experts_implementation = "eager"  # type: ignore[union-attr]
        module.config = own  # type: ignore[assignment]
