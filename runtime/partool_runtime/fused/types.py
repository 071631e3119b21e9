"""What putting kernels in the place of a model's parts has to know."""

from __future__ import annotations

from typing import NamedTuple

from partool.plan.types import Plan
from partool.spec.model import ModelConfig
from partool.spec.training import Fused


class Fusing(NamedTuple):
    """Which parts, of what model, and how."""

    parts: tuple[Fused, ...]
    model: ModelConfig
    mode: str = "auto"
    """``kernels.mode`` of the spec."""
    leaves: tuple[str, ...] = ()
    """Patterns of modules whose parameters are gathered by themselves, as they are called."""
    pipelined: bool = False
    """Several micro-batches may be between their forward and backward passes."""

    @classmethod
    def of(cls, plan: Plan) -> Fusing:
        """Return what a plan says."""
        layout = plan.layout
        return cls(layout.fused, plan.model, plan.kernels.mode, layout.leaves, pipelined=layout.mesh.pp > 1)
