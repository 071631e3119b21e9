"""Parameters that a token passes through, as publications of models with experts count them."""

from __future__ import annotations

from partool.layout.parameters import parameters
from partool.spec.model import ModelConfig


def count_active(config: ModelConfig) -> int:
    """Return the number of elements one token passes through, counting only ``top_k`` experts per layer."""
    total = 0
    for info in parameters(config):
        if info.kind == "expert" and config.moe is not None:
            total += info.elements * config.moe.top_k // config.moe.experts
        else:
            total += info.elements
    return total
