"""Scores of rows for tasks: each layout gives those of one process, which reads them from logits, in float64."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _ranks import Pools
from _tasks_process import ROWS as FEW
from _tasks_process import SCORED as FEW_SCORED
from _tasks_worker import judge_plan, score
from _tensor_plans import EVEN, LENGTH, tensor_plan
from often import often
from torch.nn import functional

from partool.plan.evaluation_result import read_result
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.evaluation import EvaluationSpec
from partool.spec.model import Weights
from partool_runtime.weights import build, fill, materialise

LAYOUTS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "one rank": (Mesh(), {}),
    "tensor": (Mesh(tp=2), {}),
    "ZeRO-3": (Mesh(dp_shard=2), {"settings": {"zero": 3}}),
    "pipeline": (Mesh(pp=2), {"stages": ((0, 1), (1, 4)), "schedule": "gpipe"}),
    "tensor with shares and tiles": (Mesh(tp=2), {"sequence_norms": True, "loss_tile_tokens": 7}),
    "tied": (Mesh(tp=2), {"model": {"tied_embeddings": True}}),
    "ring": (Mesh(cp=2), {"sequence_method": "ring", "settings": {"zero": 3}}),
    "ulysses": (Mesh(cp=2), {"sequence_method": "ulysses"}),
    "experts": (Mesh(dp_shard=2), {"expert": 2, "model": {"moe": {"experts": 4, "top_k": 2, "ffn_hidden": 11}}}),
    "two dimensions": (Mesh(tp=4), {"tensor_inner": 2, "model": EVEN}),
    "data and tensor": (Mesh(dp_shard=2, tp=2), {"settings": {"zero": 1}}),
}
OFTEN = ["one rank", "tensor", "ZeRO-3", "pipeline"]


def plan_of(name: str, tasks: tuple[str, ...] = ("squares",)) -> Plan:
    mesh, rest = LAYOUTS[name]
    plan = tensor_plan(Path("unused"), mesh, **rest)
    weights = Weights(source="dummy")
    return plan.model_copy(
        update={"job": "evaluate", "weights": weights, "evaluation": EvaluationSpec(tasks=list(tasks))}
    )


@cache
def rows() -> tuple[list[list[int]], list[int]]:
    """Return rows of tokens, the longest first, with the number of their scored tokens."""
    draw = random.Random(3)
    lengths = sorted((draw.randint(2, LENGTH + 1) for _ in range(13)), reverse=True)
    lengths[0] = LENGTH + 1
    tokens = [[draw.randrange(257) for _ in range(length)] for length in lengths]
    return tokens, [draw.randint(1, length - 1) for length in lengths]


def alone(plan: Plan, tokens: list[list[int]], scored: list[int]) -> tuple[list[float], list[int]]:
    """Return the log-likelihoods and the misses of one process, row after row."""
    model = build(plan.model).to(torch.float64)
    materialise(model, "cpu")
    fill(model, plan.weights, seed=plan.training.seed)
    return log_likelihoods(model, tokens, scored)


def log_likelihoods(model: Any, tokens: list[list[int]], scored: list[int]) -> tuple[list[float], list[int]]:
    """Return of each row the log-likelihood of its scored tokens, and how many of them are not the first choice."""
    values, misses = [], []
    with torch.no_grad():
        for row, count in zip(tokens, scored, strict=True):
            logits = model.logits(torch.tensor([row[:-1]]))[0, -count:]
            labels = torch.tensor(row[-count:])
            values.append(-float(functional.cross_entropy(logits, labels, reduction="sum")))
            misses.append(int((logits.argmax(1) != labels).sum()))
    return values, misses


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", often(list(LAYOUTS), OFTEN))
def test_every_layout_gives_the_scores_of_one_process(name: str, pools: Pools) -> None:
    plan, (tokens, scored) = plan_of(name), rows()
    if name == "one rank":  # labels that the model chooses itself
        tokens = [*tokens[:-1], [*tokens[-1][:-1], _choice(plan, tokens[-1][:-1])]]
        scored = [*scored[:-1], 1]
    values, misses = alone(plan, tokens, scored)
    assert name != "one rank" or misses[-1] == 0
    results = pools.run(plan.layout.mesh.world_size, score, plan.to_json(), tokens, scored, timeout_s=60)
    for sums, missed in results:
        assert sums == pytest.approx(values, abs=1e-10)
        assert missed == misses


def _choice(plan: Plan, context: list[int]) -> int:
    model = build(plan.model).to(torch.float64)
    materialise(model, "cpu")
    fill(model, plan.weights, seed=plan.training.seed)
    with torch.no_grad():
        return int(model.logits(torch.tensor([context]))[0, -1].argmax())


@pytest.mark.timeout(120)
def test_rank_0_hears_what_the_tasks_ask(pools: Pools, tmp_path: Path) -> None:
    jobs, plan = Jobs(tmp_path, pools, judge_plan), plan_of("ZeRO-3")
    jobs.train("judged", plan, run="judged")
    jobs.train("unknown", plan_of("ZeRO-3", ("unknown",)), run="unknown")
    assert [jobs.ended("judged", rank) for rank in range(2)] == ["done", "done"]
    values, _ = alone(plan, FEW, FEW_SCORED)
    result = read_result(tmp_path / "judged")
    assert result is not None
    metrics = result.tasks["squares"].metrics
    assert metrics["sum"].value == pytest.approx(sum(values), abs=1e-10)
    assert metrics["first"].value == pytest.approx(values[0], abs=1e-10)
    assert (metrics["sum"].stderr, metrics["nothing"].value) == (0.5, None)
    (line,) = (tmp_path / "judged" / "evaluation.requests.jsonl").read_text().splitlines()
    assert json.loads(line)["log_likelihood"] == metrics["first"].value
    (event,) = jobs.events("judged", "evaluation")
    assert event == {"step": 0, "tasks": {f"squares/{name}": metrics[name].value for name in ("sum", "first")}}
    for rank in range(2):  # the agent shows what the rank says that ends first
        assert "PT539" in jobs.ended("unknown", rank)
        assert "cannot be loaded" in jobs.ended("unknown", rank)
