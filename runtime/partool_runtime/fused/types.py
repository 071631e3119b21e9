"""Settings for the replacement of a model's parts by kernels."""

from __future__ import annotations

from typing import NamedTuple

from partool.plan.layout import Layout
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.schedule.simulate import peak_held
from partool.spec.model import ModelConfig
from partool.spec.training import Fused


class Fusing(NamedTuple):
    """The parts of a model to replace, the model's settings, and the kernels' settings."""

    parts: tuple[Fused, ...]
    model: ModelConfig
    mode: str = "auto"
    """``kernels.mode`` of the spec."""
    leaves: tuple[str, ...] = ()
    """Patterns of modules whose parameters are gathered separately, when the module is called."""
    several: bool = False
    """Whether several micro-batches may be between the last stage's forward and backward passes at once."""

    @classmethod
    def of(cls, plan: Plan) -> Fusing:
        """Return the settings of a plan."""
        layout = plan.layout
        return cls(layout.derived.fused, plan.model, plan.kernels.mode, layout.data.leaves, several=_several(layout))


def _several(layout: Layout) -> bool:
    """Return the value of :attr:`Fusing.several` for a layout's schedule; for GPipe, for example, it is True."""
    if layout.mesh.pp == 1 or "loss" not in layout.derived.fused:
        return False
    try:
        schedule = schedule_of(layout)
    except ValueError:
        return True  # ``trained_schedule`` reports this error
    last = schedule.stages - 1
    return any(peak_held([action for action in actions if action.stage == last]) > 1 for actions in schedule.lists)
