"""Multi-token prediction in plain torch, one document after the other, from DeepSeek-V3's formulas (arXiv 2412.19437).

Equations 21 to 25 of section 2.2, for a dense decoder with RoPE and full attention. The concatenation has the embedding
first, as DeepSeek's folders store the projection. The losses of all depths are divided by the same number of tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.spec.model import ModelConfig
from partool_runtime.building import build, materialise
from partool_runtime.data import open_data
from partool_runtime.weights import fill

Weights = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Return ``[S, N, D]`` rotated by RoPE, as complex numbers of which each pair of halves makes one."""
    length, _, width = x.shape
    angles = torch.outer(torch.arange(length), theta ** (-torch.arange(0, width, 2).double() / width))[:, None]
    first, second = x.chunk(2, dim=-1)
    rotated = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag], dim=-1)


def block(x: torch.Tensor, weights: Weights, number: int, config: ModelConfig) -> torch.Tensor:
    """Return the transformer block ``number`` of ``x``, ``[S, H]``."""
    of = {name.removeprefix(f"layers.{number}."): weight for name, weight in weights.items()}
    normed = norm(x, of["attention_norm.weight"], config)
    heads = [normed @ of[f"attention.{name}.weight"].T for name in ("q", "k", "v")]
    q, k, v = (each.view(len(x), config.heads, config.head_dim) for each in heads)
    q, k = turned(q, config.rope_theta), turned(k, config.rope_theta)
    scores = torch.einsum("snd,tnd->nst", q, k) / math.sqrt(config.head_dim)
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    seen = torch.einsum("nst,tnd->snd", scores.masked_fill(later, -math.inf).softmax(-1), v)
    x = x + seen.reshape(len(x), -1) @ of["attention.o.weight"].T
    normed = norm(x, of["ffn_norm.weight"], config)
    gate, up = (normed @ of[f"ffn.{name}.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ of["ffn.down.weight"].T


def losses(tokens: torch.Tensor, weights: Weights, config: ModelConfig) -> list[torch.Tensor]:
    """Return the sums of the losses of a document's tokens at depth 0 (the model's), 1, and so on."""
    embedding = weights["embed.weight"]
    head = embedding if config.tied_embeddings else weights["head.weight"]
    hidden = embedding[tokens]
    for number in range(config.layers):
        hidden = block(hidden, weights, number, config)
    hidden = norm(hidden, weights["final_norm.weight"], config)
    sums = [F.cross_entropy(hidden[:-1] @ head.T, tokens[1:], reduction="sum")]
    for depth in range(1, config.predictions + 1):
        if len(tokens) < depth + 2:
            sums.append(torch.zeros((), dtype=hidden.dtype))
            continue
        of = {name.removeprefix(f"predictions.{depth - 1}."): weight for name, weight in weights.items()}
        later = norm(embedding[tokens[depth:]], of["embedding_norm.weight"], config)
        # The hidden states of the depth before end one position later.
        pair = torch.cat([later, norm(hidden[: len(later)], of["hidden_norm.weight"], config)], dim=-1)
        hidden = block(pair @ of["projection.weight"].T, weights, config.layers + depth - 1, config)
        hidden = norm(hidden, of["final_norm.weight"], config)
        sums.append(F.cross_entropy(hidden[:-1] @ head.T, tokens[depth + 1 :], reduction="sum"))
    return sums


def documents(row: torch.Tensor, numbers: torch.Tensor | None) -> list[torch.Tensor]:
    if numbers is None:
        return [row]
    return [row[numbers == number] for number in numbers.unique()]


def validated(data: Any, weights: Weights, config: ModelConfig) -> float:
    """Return the mean loss of the model alone over the held-out rows, each of which is one document."""
    total, labels = 0.0, 0
    for micro in data.validation():
        for tokens, labels_S in zip(micro.tokens_BS, micro.labels_BS, strict=True):
            if (labels_S >= 0).all():
                total += float(losses(torch.cat([tokens, labels_S[-1:]]), weights, config)[0])
                labels += len(labels_S)
    return total / labels


def train_alone(plan: Plan) -> dict[str, Any]:
    """Train on the rows of all steps; return the losses of the model and of its modules, and the weights."""
    config, spec, training = plan.model, plan.optimizer, plan.training
    model = build(config).to(torch.float64)
    materialise(model, "cpu")
    fill(model, plan.weights, seed=training.seed)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    groups = [
        {"params": [p for p in weights.values() if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in weights.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.betas[0], spec.betas[1]), eps=spec.eps)
    out: dict[str, Any] = {"losses": [], "multi_token": [], "norms": []}
    with open_data(plan, dp_rank=0, dp_size=1, barrier=lambda: None) as data:
        for step in range(training.steps):
            sums, labels = [], 0
            for number in data.sample_ids(step).tolist():
                row = torch.from_numpy(data._train.row(number))
                numbers = torch.from_numpy(data._train.documents(number)) if plan.data.attend == "document" else None
                for tokens in documents(row, numbers):
                    if len(tokens) > 1:
                        sums.append(torch.stack(losses(tokens, weights, config)))
                        labels += len(tokens) - 1
            main, *further = (torch.stack(sums).sum(0) / labels).unbind()
            mean = sum(further) / config.predictions
            optimizer.zero_grad()
            (main + training.multi_token_weight * mean).backward()
            norm_before = float(clip_grad_norm_(weights.values(), math.inf))
            torch._foreach_mul_([p.grad for p in weights.values()], min(1.0, spec.clip / norm_before))
            for group in optimizer.param_groups:
                group["lr"] = spec.lr * lr_factor(spec.schedule, step, training.steps)
            optimizer.step()
            out["losses"].append(float(main.detach()))
            out["multi_token"].append(float(mean.detach()))
            out["norms"].append(norm_before)
        with torch.no_grad():
            out["validation"] = validated(data, weights, config)
    return out | {"weights": {name: p.detach() for name, p in weights.items()}}
