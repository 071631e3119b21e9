"""Named sets, and prompts that validations continue: every layout has the figures and tokens of one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _ranks import Pools
from _tensor_plans import LENGTH, tensor_plan

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.plan.validations import read_validations
from partool.spec.data import ValidationSet
from partool.spec.judging import BestSpec
from partool.spec.training import Validation
from partool_runtime.data import open_data
from partool_runtime.weights import build, fill, materialise

STEPS, NEW = 2, 4
PROMPTS = ["a cat", "9 is 3 by 3; ", "x"]
ONE = Mesh()
TIED_STAGES: dict[str, Any] = {"stages": ((0, 1), (1, 4)), "schedule": "gpipe"}
LAYOUTS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "one rank": (ONE, {}),
    "ZeRO-3": (Mesh(dp_shard=2), {"settings": {"zero": 3}}),
    "tensor": (Mesh(tp=2), {"sequence_norms": True}),
    "pipeline": (Mesh(pp=2), TIED_STAGES),
    "ring": (Mesh(cp=2), {"sequence_method": "ring"}),
}


def plan_of(folder: Path, mesh: Mesh, **rest: Any) -> Plan:
    """Return a plan that validates two sets, and continues prompts, after each of its two steps."""
    rest["settings"] = {"steps": STEPS, **rest.get("settings", {})}
    plan = tensor_plan(folder / "text", mesh, **rest)
    sets = {
        "squares": ValidationSet(source=str(folder / "squares.txt")),
        "words": ValidationSet(source=str(folder / "words.txt")),
    }
    data = plan.data.model_copy(update={"validation": 0.0, "validation_sets": sets})
    validation = Validation(every=1, samples=5, prompts=PROMPTS, new_tokens=NEW)
    training = plan.training.model_copy(update={"validation": validation})
    checkpoint = plan.checkpoint.model_copy(update={"best": BestSpec(metric="words/loss")})
    return plan.model_copy(update={"data": data, "training": training, "checkpoint": checkpoint})


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Jobs, dict[str, Plan]]:
    folder = tmp_path_factory.mktemp("sets")
    (folder / "text").mkdir()
    squares = "".join(f"{number * number} is the square of {number}; " for number in range(40))
    (folder / "text" / "squares.txt").write_text(squares)
    (folder / "squares.txt").write_text(squares[:101])
    (folder / "words.txt").write_text("a cat sat on a mat, and the mat was flat. " * 2)
    jobs = Jobs(folder, pools)
    plans = {name: plan_of(folder, mesh, **rest) for name, (mesh, rest) in LAYOUTS.items()}
    for name, plan in plans.items():
        jobs.train(name, plan, run=name)
    jobs.train("stopped", plans["ZeRO-3"], run="resumed", stop_at=1)
    jobs.train("resumed", plans["tensor"], run="resumed", resume=True)
    return jobs, plans


def model_after(jobs: Jobs, plan: Plan, run: str) -> torch.nn.Module:
    """Return the model of a run's last checkpoint in one process."""
    model = build(plan.model).to(torch.float64)
    materialise(model, "cpu")
    fill(model, plan.weights, seed=plan.training.seed)
    state = jobs.state(run, STEPS)
    model.load_state_dict({name.removeprefix("model."): x for name, x in state.items() if name.startswith("model.")})
    return model.eval()


def continued(model: Any, prompt: str) -> list[int]:
    """Return the likeliest tokens after a prompt, without padding and one sequence at a time."""
    ids = list(prompt.encode())
    for _ in range(NEW):
        if len(ids) == LENGTH:
            break
        token = int(model.logits(torch.tensor([ids]))[0, -1].argmax())
        if token == 0:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.timeout(240)
def test_every_layout_continues_prompts_alike(ran: tuple[Jobs, dict[str, Plan]]) -> None:
    jobs, plans = ran
    with torch.no_grad():
        model = model_after(jobs, plans["one rank"], "one rank")
        expected = [continued(model, prompt) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in expected}) > 1, "all alike would show little"
    texts = [bytes(ids).decode(errors="replace") for ids in expected]
    for name in LAYOUTS:
        samples = jobs.events(name, "validation")[-1]["samples"]
        assert [each["prompt"] for each in samples] == PROMPTS
        assert [each["tokens"] for each in samples] == list(map(len, expected)), name
        assert [each["text"] for each in samples] == texts, name


def test_every_layout_has_the_figures_of_each_set(ran: tuple[Jobs, dict[str, Plan]]) -> None:
    jobs, plans = ran
    model: Any = model_after(jobs, plans["one rank"], "one rank")
    with open_data(plans["one rank"], dp_rank=0, dp_size=1, barrier=lambda: None) as data, torch.no_grad():
        sums = {}
        for name in data.sets:
            pairs = [(micro.tokens_BS, micro.labels_BS) for micro in data.validation(name)]
            count = sum(int((labels != -100).sum()) for _, labels in pairs)
            sums[name] = (sum(float(model(*pair)) for pair in pairs), count)
    assert {name: count for name, (_, count) in sums.items()} == {"squares": 5 * LENGTH, "words": 5 * LENGTH}
    total = sum(loss for loss, _ in sums.values()) / sum(count for _, count in sums.values())
    for name in (*LAYOUTS, "resumed"):
        event = jobs.events(name, "validation")[-1]
        assert event["loss"] == pytest.approx(total, rel=1e-11), name
        for of_set, (loss, count) in sums.items():
            assert event["sets"][of_set]["loss"] == pytest.approx(loss / count, rel=1e-11), (name, of_set)
            assert event["sets"][of_set]["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-10)
            assert event["sets"][of_set]["tokens"] == count


def test_a_resumed_run_keeps_the_figures_of_sets(ran: tuple[Jobs, dict[str, Plan]]) -> None:
    jobs, _ = ran
    assert "Preempted" in jobs.ended("stopped")
    assert jobs.ended("resumed") == "done"
    alone = read_validations(jobs.folder / "one rank" / "checkpoints").rows
    rows = read_validations(jobs.folder / "resumed" / "checkpoints").rows
    assert [row.step for row in rows] == [row.step for row in alone] == [1, 2]
    for row, of_one in zip(rows, alone, strict=True):
        assert row.figures.keys() == {
            "loss",
            *(f"{name}/{x}" for name in ("squares", "words") for x in ("loss", "perplexity")),
        }
        assert row.figures == pytest.approx(of_one.figures, rel=1e-11)
    assert json.loads((jobs.folder / "resumed" / "checkpoints" / "validations.json").read_text())["ended"] == ""
