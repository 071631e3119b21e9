"""The one place that replaces forward passes of modules that are not partool's: those of transformers, and of users.

partool's own layers have attributes for what parallelism changes (:mod:`partool_runtime.model.projection`). The code of
other modules has none, so their forward passes are wrapped, for the reasons in :class:`Patch`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import nn


class Patch(Enum):
    """Why a forward pass is replaced; the value says what the new one does."""

    FLOAT64 = "keeps float64 where the module's code casts to float32"
    TENSOR = "exchanges with tensor ranks before or after the products with this rank's parts of matrices"
    ROTARY = "computes rotary tables of a rank's tokens with the frequencies of whole sequences"
    SECOND_PASS = "recomputes in the backward pass, or works tile by tile"
    GRAPH = "runs a rank's part of the graph that was captured from the module"


def patch_forward(module: nn.Module, patch: Patch, forward: Callable[..., Any]) -> None:
    """Replace the forward pass of ``module``, in place, for the reason ``patch``.

    The reasons stay on the module as ``_partool_patches``, the innermost first, for people who look at one.
    """
    module.__dict__.setdefault("_partool_patches", []).append(patch)
    module.__dict__["forward"] = forward


def has_patched_forward(module: nn.Module) -> bool:
    """Return whether the forward pass of ``module`` is another than that of its class."""
    return "forward" in module.__dict__
