"""The plan of a teacher on the ranks of its student."""

from __future__ import annotations

from partool.plan.layout import Layout, OffloadLayout, PipelineLayout
from partool.plan.types import Plan
from partool.spec.evaluation import EvaluationSpec
from partool.spec.model import ModelConfig
from partool.spec.objective import ObjectiveSpec
from partool.spec.training import AdversarialSpec


def of_teacher(plan: Plan) -> Plan | None:
    """Return the plan by which ranks build the teacher of a plan's model; None without a teacher.

    It has the student's ranks, precision and kernels. Everything in it is frozen, and it computes no loss.
    """
    teacher = plan.teacher
    if teacher is None:
        return None
    training = plan.training.model_copy(
        update={"z_loss": 0.0, "distill": None, "ema": None}
        | {"objective": ObjectiveSpec(), "adversarial": AdversarialSpec()}
    )
    return plan.model_copy(
        update={
            "model": teacher.model,
            "weights": teacher.weights,
            "partition": teacher.partition,
            "teacher": None,
            "adapter": None,
            "frozen": (),
            "layout": layout_of_teacher(plan.layout, teacher.model),
            "training": training,
            "evaluation": EvaluationSpec(),
        }
    )


def layout_of_teacher(layout: Layout, teacher: ModelConfig) -> Layout:
    """Return the layout of a teacher's forward passes on ranks of one pipeline stage."""
    fused = tuple(part for part in layout.derived.fused if part != "loss")
    experts: dict[str, object] = {}
    if teacher.moe is None:
        experts = {"expert": 1, "expert_tensor": 1, "expert_exchange": "direct", "expert_rank_capacity": None}
    return layout.model_copy(
        update={
            "pipeline": PipelineLayout(layers=(teacher.layers,)),
            "recompute": ("none",) * teacher.layers,
            "offload": OffloadLayout(),
            "derived": layout.derived.model_copy(update={"fused": fused}),
            "data": layout.data.model_copy(update={"leaves": ()}),
            **experts,
        }
    )
