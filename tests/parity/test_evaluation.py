"""Evaluations of all layouts give the loss of one process, which computes each sequence's loss by itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _evaluation_worker import evaluate_plan
from _jobs import Jobs
from _own_models import own_model, own_plan, write_own
from _ranks import Pools
from _tensor_plans import LENGTH, tensor_plan
from torch.nn import functional

from partool.cost.training.traffic import traffic_bytes
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.planner.elastic import job_of_plan
from partool.spec.model import Weights
from partool_runtime.data import open_data
from partool_runtime.weights import build, fill, materialise

TEXT = "".join(f"{number * number} is the square of {number}; " for number in range(57))
ONE, DATA, TENSOR, PIPELINE = Mesh(), Mesh(dp_shard=2), Mesh(tp=2), Mesh(pp=2)
LAYOUTS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "one rank": (ONE, {}),
    "ZeRO-0": (Mesh(dp_replicate=2), {"settings": {"zero": 0}}),
    "ZeRO-1": (DATA, {"settings": {"zero": 1}}),
    "ZeRO-3": (DATA, {"settings": {"zero": 3}}),
    "tensor": (TENSOR, {}),
    "tensor, sharded norms": (TENSOR, {"sequence_norms": True}),
    "pipeline": (PIPELINE, {"stages": ((0, 1), (1, 4)), "schedule": "gpipe"}),
    "ring": (Mesh(cp=2), {"sequence_method": "ring", "settings": {"zero": 3}}),
    "experts": (DATA, {"expert": 2, "model": {"moe": {"experts": 4, "top_k": 2, "ffn_hidden": 11}}}),
}


def plan_of(text: Path, mesh: Mesh, *, held_out: float = 0.0, **rest: Any) -> Plan:
    rest["settings"] = {"steps": 1000, **rest.get("settings", {})}
    plan = tensor_plan(text, mesh, **rest)
    data = plan.data.model_copy(update={"validation": held_out})
    return plan.model_copy(update={"job": "evaluate", "data": data})


def with_steps(plan: Plan, steps: int) -> Plan:
    return plan.model_copy(update={"training": plan.training.model_copy(update={"steps": steps})})


def alone(plan: Plan) -> tuple[float, int, int]:
    """Return the mean loss, tokens and sequences of one process, from the logits of one sequence after the other."""
    logits_of: Callable[[torch.Tensor], torch.Tensor]
    if plan.module is not None:
        logits_of = own_model("dropped").eval()
    else:
        model = build(plan.model).to(torch.float64)
        materialise(model, "cpu")
        fill(model, plan.weights, seed=plan.training.seed)
        logits_of = model.logits
    total, tokens, sequences = 0.0, 0, 0
    with open_data(plan, dp_rank=0, dp_size=1, barrier=lambda: None) as data, torch.no_grad():
        samples = data._validation if plan.data.validation else data._train
        for number in range(samples.count):
            row = torch.from_numpy(samples.row(number).astype("int64"))
            inputs, labels = row[None, :-1].clamp(min=0), row[1:]
            seen = labels >= 0
            logits = logits_of(inputs)[0, seen]
            total += float(functional.cross_entropy(logits, labels[seen], reduction="sum"))
            tokens, sequences = tokens + int(seen.sum()), sequences + 1
    return total / tokens, tokens, sequences


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Jobs, dict[str, Plan]]:
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "text").mkdir()
    (folder / "text" / "squares.txt").write_text(TEXT)
    jobs = Jobs(folder, pools, evaluate_plan)
    plans = {name: plan_of(folder / "text", mesh, **rest) for name, (mesh, rest) in LAYOUTS.items()}
    for name, plan in plans.items():
        jobs.train(name, plan, run=name)
    held_out = plan_of(folder / "text", DATA, held_out=0.3)
    plans["held out"] = held_out
    jobs.train("held out", held_out, run="held out")
    jobs.train("stopped", plans["ZeRO-3"], run="broken", stop_at=2)
    jobs.train("rest", plans["tensor"], run="broken", resume=True)
    jobs.train("other data", held_out, run="broken", resume=True)
    other = plans["one rank"].model_copy(update={"weights": Weights(source="dummy")})
    jobs.train("other weights", other, run="broken", resume=True)
    jobs.train("other steps", with_steps(plans["one rank"], 3), run="broken", resume=True)
    write_own("dropped", folder)
    weights = Weights(source="hf", path=str(folder / "dropped"))
    own = own_plan(plans["one rank"], "dropped", DATA, zero=3, micro_batch=3, accumulation=2)
    plans["dropout"] = own.model_copy(update={"weights": weights})
    jobs.train("dropout", plans["dropout"], run="dropout")
    few = plans["few"] = with_steps(plans["one rank"], 2)
    jobs.train("few", few, run="few")
    return jobs, plans


def result(jobs: Jobs, run: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((jobs.folder / run / "evaluation.json").read_text())
    return figures


@pytest.mark.timeout(300)
def test_every_layout_gives_the_loss_of_one_process(ran: tuple[Jobs, dict[str, Plan]]) -> None:
    jobs, plans = ran
    reference, of_experts = alone(plans["one rank"]), alone(plans["experts"])
    assert reference[2] % 12, "the last batch is to be filled up"
    for name in LAYOUTS:
        loss, tokens, sequences = of_experts if name == "experts" else reference
        ranks = plans[name].layout.mesh.world_size
        assert [jobs.ended(name, rank) for rank in range(ranks)] == ["done"] * ranks
        figures = result(jobs, name)
        assert figures["loss"] == pytest.approx(loss, rel=1e-12), name
        assert figures["perplexity"] == pytest.approx(math.exp(loss), rel=1e-11)
        assert figures["tokens"] == tokens, name
        assert figures["steps"] == math.ceil(sequences / 12)
        (event,) = jobs.events(name, "validation")
        assert event["loss"] == pytest.approx(loss, rel=1e-12)


def test_nothing_is_dropped(ran: tuple[Jobs, dict[str, Plan]]) -> None:
    jobs, plans = ran
    assert jobs.ended("dropout") == "done"
    assert result(jobs, "dropout")["loss"] == pytest.approx(alone(plans["dropout"])[0], rel=1e-12)


@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-3", "ring", "experts"])
def test_ranks_send_what_is_planned(ran: tuple[Jobs, dict[str, Plan]], name: str) -> None:
    jobs, plans = ran
    (summary,) = (event for event in jobs.events(name, "summary") if event["scope"] == "rank")
    planned = traffic_bytes(job_of_plan(plans[name], plans[name].devices), plans[name].layout)
    # Odd rows are padded, and which expert a token takes is drawn.
    for term, error in (("parameter_gather", 0.01), ("sequence", 0.01), ("expert", 0.05)):
        measured = summary["measures"]["traffic"].get(term, {"value": 0.0})["value"]
        assert measured == pytest.approx(planned[term], rel=error), term
    assert planned["parameter_gather"] > 0
    assert planned["gradient_sync"] == 0


def test_held_out_data_are_evaluated_alone(ran: tuple[Jobs, dict[str, Plan]]) -> None:
    jobs, plans = ran
    loss, tokens, _ = alone(plans["held out"])
    assert tokens < result(jobs, "one rank")["tokens"]
    assert (result(jobs, "held out")["loss"], result(jobs, "held out")["tokens"]) == (
        pytest.approx(loss, rel=1e-12), tokens,
    )  # fmt: skip


def test_a_stopped_evaluation_goes_on_in_another_layout(ran: tuple[Jobs, dict[str, Plan]]) -> None:
    jobs, _ = ran
    assert all("Preempted" in jobs.ended("stopped", rank) for rank in range(2))
    assert jobs.ended("rest") == "done"
    assert [event["resumed_from"] for event in jobs.events("broken", "start")][:2] == [0, 2]
    assert result(jobs, "broken")["loss"] == pytest.approx(result(jobs, "one rank")["loss"], rel=1e-12)
    assert "PT616" in jobs.ended("other data")
    assert "PT616" in jobs.ended("other weights")
    assert "PT616" in jobs.ended("other steps")
    assert [path.name for path in (jobs.folder / "broken" / "checkpoints").iterdir()] == [
        f"step-{result(jobs, 'broken')['steps']:08d}"
    ]


def test_fewer_steps_take_sequences_at_even_spaces(ran: tuple[Jobs, dict[str, Plan]]) -> None:
    jobs, plans = ran
    assert (result(jobs, "few")["steps"], result(jobs, "few")["tokens"]) == (2, 24 * LENGTH)
    with open_data(plans["few"], dp_rank=0, dp_size=1, barrier=lambda: None) as data:
        rows = [row for step in range(2) for micro in data.evaluation("", step) for row in micro.tokens_BS.tolist()]
        count = data._train.count
        assert rows == [data._train.row(place * count // 24)[:-1].tolist() for place in range(24)]
