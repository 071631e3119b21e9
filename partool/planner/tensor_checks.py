"""How the model is cut over tensor-parallel ranks, and rules about it."""

from __future__ import annotations

from partool.layout.tensor import Partition, own_partition
from partool.plan.types import Layout
from partool.planner.problem import Problem


def partition(problem: Problem, layout: Layout) -> tuple[Partition, ...]:
    """Return how the tensor ranks of a layout share each parameter; nothing where there is one of them."""
    return own_partition(problem.model, layout.mesh.tp, layout.tensor_inner, layout.sequence_norms)
