"""Distillation in plain torch: cross entropy and KL of whole logits, from the formulas of the papers.

The loss of DeepSpeed-MoE (arXiv 2201.05596, section 4.2.1) with the temperature of Hinton et al. (arXiv 1503.02531).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.spec.model import ModelConfig, Weights
from partool_runtime.building import build, materialise
from partool_runtime.data import open_data
from partool_runtime.weights import fill


def started(model: ModelConfig, weights: Weights, seed: int) -> Any:
    """Return a model with its first weights, in float64."""
    decoder = build(model).double()
    materialise(decoder, torch.device("cpu"))
    fill(decoder, weights, seed=seed)
    return decoder


def logits_of(model: Any, micro: Any) -> torch.Tensor:
    """Return the logits of a micro-batch, ``[B · S, V]``."""
    weight = model.embed.weight if model.head is None else model.head.weight
    return F.linear(model.hidden(micro.tokens_BS, micro.documents_BL), weight).flatten(0, 1)


def losses(student: Any, teacher: Any, batch: Any, spec: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross entropy of the labels of a step, and the mean KL(teacher ‖ student) of their positions."""
    entropies, divergences = [], []
    for micro in batch:
        labels = micro.labels_BS.flatten()
        counted = labels != -100
        mine = logits_of(student, micro)[counted]
        entropies.append(-mine.log_softmax(1)[torch.arange(len(mine)), labels[counted]])
        if teacher is not None:
            with torch.no_grad():
                taught = (logits_of(teacher, micro)[counted] / spec.temperature).softmax(1)
            divergences.append((taught * (taught.log() - (mine / spec.temperature).log_softmax(1))).sum(1))
    return torch.cat(entropies).mean(), torch.cat(divergences).mean() if divergences else torch.zeros(())


def train_alone(plan: Plan) -> dict[str, Any]:
    """Train on the rows of all steps; return losses, divergences, the validation's loss, and the weights."""
    training, spec, of_teacher = plan.training, plan.optimizer, plan.teacher
    distill = training.distill
    assert distill is not None
    assert of_teacher is not None
    student = started(plan.model, plan.weights, training.seed)
    teacher = started(of_teacher.model, of_teacher.weights, training.seed)
    named = dict(student.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.betas[0], spec.betas[1]), eps=spec.eps)
    out: dict[str, Any] = {"losses": [], "kl": []}
    with open_data(plan, dp_rank=0, dp_size=1, barrier=lambda: None) as data:
        for step in range(training.steps):
            taught = distill.until is None or step < distill.until
            entropy, divergence = losses(student, teacher if taught else None, data.step(step), distill)
            optimizer.zero_grad()
            (entropy + distill.weight * distill.temperature**2 * divergence).backward()
            norm = float(clip_grad_norm_(named.values(), math.inf))
            torch._foreach_mul_([p.grad for p in named.values() if p.grad is not None], min(1.0, spec.clip / norm))
            for group in optimizer.param_groups:
                group["lr"] = spec.lr * lr_factor(spec.schedule, step, training.steps)
            optimizer.step()
            out["losses"].append(float(entropy.detach()))
            out["kl"].append(float(divergence.detach()) if taught else None)
        with torch.no_grad():
            out["validation"] = float(losses(student, None, list(data.validation()), distill)[0])
    return out | {"weights": {name: p.detach() for name, p in named.items()}}
