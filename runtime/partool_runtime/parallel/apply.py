"""The order in which the layout is applied to a model."""

from __future__ import annotations

from partool.plan.types import Plan
from partool_runtime.mesh import Ranks
from partool_runtime.model import Decoder
from partool_runtime.parallel.compiling import compile_blocks
from partool_runtime.parallel.grad_sync import GradSync
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.zero import shard


def parallelize(model: Decoder, plan: Plan, ranks: Ranks) -> GradSync:
    """Apply the plan's layout to a model, in place, and return what exchanges its gradients.

    The order is fixed: recomputation is part of what is compiled, and gathers happen outside of both.
    """
    recompute(model, plan.layout.recompute)
    if plan.layout.compile == "block":
        compile_blocks(model)
    return shard(model, zero=plan.layout.zero, precision=plan.training.precision, ranks=ranks)
