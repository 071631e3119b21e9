"""What putting kernels in the place of a model's parts has to know."""

from __future__ import annotations

from typing import NamedTuple

from partool.plan.layout import Layout
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.schedule.simulate import peak_held
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
    several: bool = False
    """Several micro-batches may be between forward and backward pass of the last stage at once."""

    @classmethod
    def of(cls, plan: Plan) -> Fusing:
        """Return what a plan says."""
        layout = plan.layout
        return cls(layout.derived.fused, plan.model, plan.kernels.mode, layout.data.leaves, several=_several(layout))


def _several(layout: Layout) -> bool:
    """Tell it of a layout's schedule; of GPipe's, for one."""
    if layout.mesh.pp == 1 or "loss" not in layout.derived.fused:
        return False
    try:
        schedule = schedule_of(layout)
    except ValueError:
        return True  # told elsewhere, with all that is known of it
    last = schedule.stages - 1
    return any(peak_held([action for action in actions if action.stage == last]) > 1 for actions in schedule.lists)
