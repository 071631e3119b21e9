"""Names of experts' matrices in folders, and how transformers computes experts that are stacked in one tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from torch import nn


class ExpertNames(NamedTuple):
    """Names of an expert's matrices in folders; in memory, transformers 5 stacks the matrices of a layer's experts."""

    gate: str
    up: str
    down: str
    block: str = "mlp"
    """Name that saved folders give to the module with the router and the experts; in memory its name is ``mlp``."""


_USUAL = ExpertNames("gate_proj", "up_proj", "down_proj")
EXPERT_NAMES = {
    "mixtral": ExpertNames("w1", "w3", "w2", "block_sparse_moe"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"), _USUAL),
}
"""Names of experts' matrices by ``model_type``; models of other types keep the names that they have in memory."""
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
        eager_config = copy.copy(config)
        eager_config._experts_implementation = "eager"  # type: ignore[union-attr]
        module.config = eager_config  # type: ignore[assignment]
