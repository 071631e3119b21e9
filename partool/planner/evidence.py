"""Evidence behind a layout: its tier, and by how much it must be faster than a layout with more evidence."""

from __future__ import annotations

from partool.cost.evidence import mechanisms, paired_error
from partool.plan.layout import Layout
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS
from partool.strategies.tiers import OFFLOAD_OPTIMIZER, OFFLOAD_REST, TENSOR_2D


def tier_of(layout: Layout) -> int:
    """Return the tier of a layout: the highest tier of its mechanisms."""
    offload, mesh = layout.offload, layout.mesh
    schedule = SCHEDULES.get(layout.pipeline.schedule)
    return max(
        (schedule.tier if schedule else 1) if mesh.pp > 1 else 0,
        METHODS[layout.sequence.method].tier if mesh.cp > 1 else 0,
        TENSOR_2D if layout.tensor.inner > 1 else 0,
        OFFLOAD_OPTIMIZER if offload.optimizer == "cpu" else 0,
        OFFLOAD_REST if offload.parameters != "none" or offload.activations != "none" else 0,
        OFFLOAD_REST if "nvme" in (offload.optimizer, offload.parameters) else 0,
    )


def margin(layout: Layout, other: Layout) -> float:
    """Return by how much ``layout`` must be faster than ``other``, which has more evidence: twice the paired error."""
    more = set(mechanisms(layout)) - set(mechanisms(other))
    return 2.0 * paired_error(sorted(more)) if more else 0.0
