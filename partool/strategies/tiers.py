"""Tiers of evidence: how much published practice stands behind a mechanism that a plan may use.

Tiers label what a plan uses; which layout is taken is decided by scores (``partool/planner/search/score.py``).
Schedules and sequence methods name their tier in their records.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """Facts about a tier."""

    name: str
    words: str
    """Mechanisms of the tier, in a phrase."""
    source: str
    """Published practice that the tier is drawn from."""


TIERS: tuple[Tier, ...] = (
    Tier(
        "textbook",
        "ZeRO, tensor parallelism in a node, 1F1B or interleaved pipelines, experts, recomputation",
        "Megatron-LM (arXiv 2104.04473), ZeRO (arXiv 1910.02054), Llama 3 (arXiv 2407.21783, section 3.3.2)",
    ),
    Tier(
        "less common",
        "sequence parallelism, other pipeline schedules, two-dimensional tensor parallelism",
        "used by some published runs (Llama 3's long contexts), most by one code base each",
    ),
    Tier(
        "optimizer in host memory",
        "the optimizer's state in host memory",
        "ZeRO-Offload (arXiv 2101.06840): for few devices; no published pre-training run on many nodes",
    ),
    Tier(
        "more in host memory",
        "activations or parameters in host memory, or state on disks",
        "ZeRO-Infinity (arXiv 2104.07857): for models that fit no other way",
    ),
)
"""Tiers by number; 0 has most evidence."""

TENSOR_2D, OFFLOAD_OPTIMIZER, OFFLOAD_REST = 1, 2, 3
"""Tiers of two-dimensional tensor parallelism, of an optimizer in host memory, and of all other offload."""
