"""Distillation: a training whose micro-batches a frozen teacher goes over, too."""

from __future__ import annotations

from dataclasses import replace

from partool.spec.model import ModelConfig
from partool.spec.training import TrainingSpec
from partool.work.evaluation import forward_only
from partool.work.training import TrainingWork


def with_teacher(work: TrainingWork, teacher: ModelConfig | None, training: TrainingSpec) -> TrainingWork:
    """Return the work with the passes and the memory of ``training.distill``'s teacher, if there is one."""
    if teacher is None or training.distill is None:
        return work
    alone = replace(work, model=teacher, recompute=None, stage_layers=None, lists=None, shared_elements=0)
    return replace(work, teacher=forward_only(alone), taught=training.distill.share(training.steps))
