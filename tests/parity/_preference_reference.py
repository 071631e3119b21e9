"""Preference training in plain torch, one answer after the other, from the formulas of the papers.

DPO: arXiv 2305.18290 (equation 7), with the smoothing of conservative DPO; IPO: arXiv 2310.12036 (algorithm 1), of mean
log-probabilities; hinge: SLiC, arXiv 2305.10425; ORPO: arXiv 2403.07691 (equations 3 to 7); SimPO: arXiv 2405.14734
(equation 6).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from partool.layout.adapters import is_adapter
from partool.layout.parameters import is_frozen
from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool_runtime.building import build, materialise
from partool_runtime.data import Batches, open_data
from partool_runtime.weights import fill
from partool_runtime.weights.draw import BlockSource

Answer = tuple[torch.Tensor, torch.Tensor]
"""Tokens of a document, and 1 for each that is trained on."""


def log_probabilities(model: Any, answers: list[Answer]) -> list[tuple[torch.Tensor, int]]:
    """Return the sum of the log-probabilities of each answer's trained tokens, and their number.

    Each answer has a row to itself. No token sees the zeros behind an answer.
    """
    length = max(len(tokens) for tokens, _ in answers)
    rows = torch.stack([F.pad(tokens, (0, length - len(tokens))) for tokens, _ in answers])
    trained = torch.stack([F.pad(flags, (0, length - len(flags))) for _, flags in answers])[:, 1:]
    picked = model.logits(rows[:, :-1]).log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
    return list(zip((picked * trained).sum(1), trained.sum(1).tolist(), strict=True))


def sigma(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def pair_loss(objective: Any, chosen: Any, rejected: Any, reference: tuple[float, float]) -> tuple[torch.Tensor, bool]:
    """Return a pair's loss, and whether the chosen answer has the higher reward."""
    (won, won_tokens), (lost, lost_tokens) = chosen, rejected
    if objective.kind == "dpo":
        beta = objective.beta or 0.1
        won, lost = won - reference[0], lost - reference[1]
        if objective.form == "ipo":
            return (won / won_tokens - lost / lost_tokens - 1 / (2 * beta)) ** 2, bool(won > lost)
        if objective.form == "hinge":
            return torch.clamp(1 - beta * (won - lost), min=0), bool(won > lost)
        margin = beta * (won - lost)
        epsilon = objective.smoothing
        loss = -(1 - epsilon) * torch.log(sigma(margin)) - epsilon * torch.log(sigma(-margin))
        return loss, bool(won > lost)
    won, lost = won / won_tokens, lost / lost_tokens
    if objective.kind == "simpo":
        beta = objective.beta or 2.0
        return -torch.log(sigma(beta * won - beta * lost - objective.gamma)), bool(won > lost)
    odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in (won, lost)]
    return -won - objective.weight * torch.log(sigma(torch.log(odds[0] / odds[1]))), bool(won > lost)


def answers(data: Batches, number: int, *, held_out: bool = False) -> list[Answer]:
    """Return the documents of a row."""
    samples = data._validation if held_out else data._train
    row, loss, documents = (
        torch.from_numpy(x) for x in (samples.row(number), samples.loss(number), samples.documents(number))
    )
    here = row >= 0
    return [(row[here & (documents == d)], loss[here & (documents == d)]) for d in range(int(documents.max()) + 1)]


def started(plan: Plan, draw: BlockSource | None = None) -> Any:
    """Return the model with its first weights; ``draw`` gives those of an adapter."""
    model = build(plan.model).to(torch.float64)
    materialise(model, "cpu")
    fill(model, plan.weights, seed=plan.training.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if draw is not None and is_adapter(name):
                parameter.copy_(draw(name, tuple(parameter.shape), (0, 0), tuple(parameter.shape)))
    return model


def train_alone(plan: Plan, draw: BlockSource | None = None) -> dict[str, Any]:
    """Train on the rows of all steps; return losses, accuracies, the validation's loss, and the weights.

    ``draw`` gives the first values of an adapter. The reference has the same, or no adapter at all.
    """
    model = reference = started(plan, draw)
    if plan.training.objective.reference == "adapter_off":
        reference = started(plan.model_copy(update={"model": plan.model.model_copy(update={"adapter": None})}))
    spec, training = plan.optimizer, plan.training
    named = {name: p for name, p in model.named_parameters() if not is_frozen(name, plan.frozen)}
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.betas[0], spec.betas[1]), eps=spec.eps)
    out: dict[str, Any] = {"losses": [], "accuracies": [], "kl": [], "norms": []}
    kept: dict[bytes, float] = {}

    def sums(rows: list[int], *, held_out: bool = False) -> tuple[torch.Tensor, float, float]:
        documents = [each for number in rows for each in answers(data, number, held_out=held_out)]
        assert len(documents) % 2 == 0
        logs = log_probabilities(model, documents)
        before = [kept[tokens.numpy().tobytes()] for tokens, _ in documents]
        pairs = [
            pair_loss(training.objective, logs[at], logs[at + 1], (before[at], before[at + 1]))
            for at in range(0, len(documents), 2)
        ]
        apart = sum(float(log.detach()) - of_reference for (log, _), of_reference in zip(logs, before, strict=True))
        divergence = apart / sum(tokens for _, tokens in logs)
        return (
            torch.stack([loss for loss, _ in pairs]).mean(),
            sum(right for _, right in pairs) / len(pairs),
            divergence,
        )

    with open_data(plan, dp_rank=0, dp_size=1, barrier=lambda: None) as data:
        for held_out, count in ((False, data._train.count), (True, data._validation.count)):
            documents = [each for row in range(count) for each in answers(data, row, held_out=held_out)]
            with torch.no_grad():
                logs = log_probabilities(reference, documents)
            kept |= {
                tokens.numpy().tobytes(): float(log) for (tokens, _), (log, _) in zip(documents, logs, strict=True)
            }
        for step in range(training.steps):
            loss, accuracy, divergence = sums(data.sample_ids(step).tolist())
            optimizer.zero_grad()
            loss.backward()
            norm = float(clip_grad_norm_(named.values(), math.inf))
            out["norms"].append(norm)
            torch._foreach_mul_([p.grad for p in named.values()], min(1.0, spec.clip / norm))
            for group in optimizer.param_groups:
                group["lr"] = spec.lr * lr_factor(spec.schedule, step, training.steps)
            optimizer.step()
            out["losses"].append(float(loss.detach()))
            out["accuracies"].append(accuracy)
            out["kl"].append(divergence)
        with torch.no_grad():
            out["validation"] = tuple(map(float, sums(list(range(data._validation.count)), held_out=True)))
    return out | {"weights": {name: p.detach() for name, p in named.items()}}
