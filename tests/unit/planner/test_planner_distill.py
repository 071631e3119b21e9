"""Prices of a teacher, what it settles and excludes, and where its model comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _bounds import above
from planned import checked, plan_of, problem_of, result_of

from partool.cost.codec import encode
from partool.cost.training.predict import time_terms
from partool.cost.training.states import teacher_bytes
from partool.cost.training.traffic import traffic_bytes
from partool.layout.parameters import count, parameters
from partool.plan.teaching import layout_of_teacher, of_teacher
from partool.plan.types import Plan
from partool.planner.cost_job import cost_job
from partool.report.plan_rows import job_rows
from partool.spec.model import Weights

TEACHER: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
SPEC = """
model: {{layers: 4, hidden: 256, heads: 8, vocab: 512, max_position: 512{model}}}
hardware: {{accelerator: h100-sxm, per_node: 4}}
training: {{sequence_length: 256, global_batch: 16, steps: 50{training}}}
parallel: {parallel}
data: python-stdlib
"""
PINNED = "{{tensor: 2, sequence: 1, data: {{zero: {zero}}}, micro_batch: 2, recompute: none, compile: none}}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("teachers")
    for name, changes in {
        "teacher": {},
        "wide": {"vocab_size": 600},
        "four heads": {"num_attention_heads": 4, "num_key_value_heads": 4},
    }.items():
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(TEACHER | changes))
    return place


def text(distill: str = "teacher", zero: int = 1, *, parallel: str = "", training: str = "", model: str = "") -> str:
    taught = f", distill: {distill}" if distill else ""
    pinned = parallel or PINNED.format(zero=zero)
    return SPEC.format(training=taught + training, parallel=pinned, model=model)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_teacher_is_its_forward_pass_and_its_weights(place: Path, zero: int) -> None:
    alone = plan_of(text("", zero), folder=place)
    taught = plan_of(text("{teacher: teacher, until: 0.4}", zero), folder=place)
    assert taught.teacher is not None
    assert taught.teacher.weights == Weights(source="hf", path=str(place / "teacher"))
    job = cost_job(problem_of(text("{teacher: teacher, until: 0.4}", zero), folder=place), "none")
    assert job.teacher is not None
    forward = time_terms(job.teacher, layout_of_teacher(taught.layout, taught.teacher.model))
    terms, before = taught.prediction.time.terms_s, alone.prediction.time.terms_s
    assert terms["tensor_parallel"] - before["tensor_parallel"] == pytest.approx(0.4 * forward["tensor_parallel"])
    assert terms["forward"] - before["forward"] == pytest.approx(0.4 * forward["forward"], rel=0.05)
    sent, once = taught.prediction.time.traffic_bytes, alone.prediction.time.traffic_bytes
    more = traffic_bytes(job.teacher, layout_of_teacher(taught.layout, taught.teacher.model))
    gathered = int(0.4 * more["parameter_gather"]) if zero == 3 else 0
    assert sent["parameter_gather"] == once["parameter_gather"] + gathered
    held = taught.prediction.memory.terms_bytes["parameters"] - alone.prediction.memory.terms_bytes["parameters"]
    # Two tensor ranks share the matrices, and with ZeRO-3 two more share these; norms are on both tensor ranks.
    whole = 2 * count(parameters(taught.teacher.model)) / 2
    assert held == pytest.approx(whole / (2 if zero == 3 else 1), rel=0.02)
    assert "first 20 of 50 steps" in dict(job_rows(taught))["Teacher"]
    assert any("a teacher of" in reason for reason in taught.reasons)


def test_prices_count_the_bytes_of_each_rank(place: Path) -> None:
    """On one rank a teacher has as many bytes as its parameters in bf16, to the byte."""
    one = text(parallel="{tensor: 1, data: {zero: 0}, micro_batch: 2, recompute: none}").replace("e: 4", "e: 1")
    plan = plan_of(one, folder=place)
    assert plan.teacher is not None
    stored, root = teacher_bytes(cost_job(problem_of(one, folder=place)), encode(plan.layout))
    assert float(np.asarray(stored)) == 2 * count(parameters(plan.teacher.model))
    assert float(np.asarray(root)) == 0.0


def test_a_teacher_settles_what_is_auto_and_its_plan_is_sound(place: Path) -> None:
    plan = plan_of(text(parallel="{}"), folder=place)
    assert plan.layout.pipeline.stages == 1
    alone = of_teacher(plan)
    assert alone is not None
    assert alone.contradiction == ""
    assert (alone.model.layers, alone.training.distill, alone.teacher) == (8, None, None)
    assert Plan.from_json(plan.to_json()).teacher == plan.teacher


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (text(parallel="{pipeline: 2}"), "PT404"),
        (text(parallel="{sequence: 2}", distill="four heads"), "PT404"),
        (text(training=", objective: dpo"), "PT404"),
        (text(training=", adversarial: {epsilon: 0.1}"), "PT404"),
        ("adapter: {}\n" + text(), "PT404"),
        (text("nowhere"), "PT680"),
        (text("wide"), "PT681"),
        (text("{teacher: teacher, until: 80}"), "PT682"),
        (text("{teacher: teacher, until: 50}"), "PT682"),
        (text("{teacher: teacher, until: 1.5}"), "PT102"),
        (text("{teacher: teacher, temperature: 0}"), "PT104"),
        (text("{teacher: teacher, until: 20}"), ""),
    ],
)
def test_findings(place: Path, spec: str, code: str) -> None:
    ours = ("PT404", "PT680", "PT681", "PT682", "PT102", "PT104")
    own = [each for each in checked(spec, folder=place) if each.code in ours]
    assert [each.code for each in own] == ([code] if code else [])
    assert all(each.help for each in own if each.code.startswith(("PT4", "PT6")))


def test_the_folder_of_a_run_is_a_teacher(place: Path, tmp_path: Path) -> None:
    trained = plan_of(text(""), folder=place)
    (tmp_path / "checkpoints" / "step-00000050").mkdir(parents=True)
    (tmp_path / "plan.json").write_text(trained.to_json())
    for folder in (tmp_path, tmp_path / "checkpoints" / "step-00000050"):
        plan = plan_of(text(str(folder)), folder=place)
        assert plan.teacher is not None
        assert plan.teacher.model == trained.model
        assert plan.teacher.weights == Weights(source="checkpoint", path=str(folder))


def test_layers_of_a_teacher_may_have_other_experts(place: Path, tmp_path: Path) -> None:
    """Its layers of each shape are counted, not those of its student."""
    experts = ', moe: {experts: 4, top_k: 2, ffn_hidden: 64, first_dense_layers: 1, layers: {"3": {experts: 8}}}'
    (tmp_path / "plan.json").write_text(plan_of(text("", model=experts), folder=place).to_json())
    one = text(str(tmp_path), parallel="{tensor: 1, data: {zero: 0}, micro_batch: 2, recompute: none}")
    one = one.replace("e: 4", "e: 1")
    plan = plan_of(one, folder=place)
    assert plan.teacher is not None
    stored, _ = teacher_bytes(cost_job(problem_of(one, folder=place)), encode(plan.layout))
    assert float(np.asarray(stored)) == 2 * count(parameters(plan.teacher.model))


@pytest.mark.long
def test_experts_that_ranks_cannot_divide_alike(place: Path, tmp_path: Path) -> None:
    """Of six experts in the teacher and four in the student, four ranks divide only the student's."""
    six = plan_of(text("", model=", moe: {experts: 6, top_k: 2, ffn_hidden: 64}"), folder=place)
    (tmp_path / "plan.json").write_text(six.to_json())
    four = ", moe: {experts: 4, top_k: 2, ffn_hidden: 64}"
    shared = "{tensor: 1, expert: 4, data: {zero: 1}, micro_batch: 2}"
    found = result_of(text(str(tmp_path), parallel=shared, model=four), folder=place).diagnostics
    assert [each.code for each in found if each.severity == "error"] == ["PT404"]
    plan = plan_of(text(str(tmp_path), parallel="{}", model=four), folder=place)
    assert plan.layout.expert == 1


def test_a_teacher_without_weights_is_an_error_where_ranks_train_here(place: Path) -> None:
    on_others = [each for each in checked(text(), folder=place) if each.code == "PT620"]
    here = text(parallel="{}").replace("accelerator: h100-sxm, per_node: 4", "accelerator: cpu")
    on_this = [each for each in checked(here, folder=place) if each.code == "PT620"]
    assert [each.severity for each in (*on_others, *on_this)] == ["warning", "error"]


@pytest.mark.long
def test_bounds_of_times_hold(place: Path) -> None:
    problem = problem_of(text("{teacher: teacher, until: 0.4}", parallel="{}"), folder=place)
    assert above(problem, 7, 60) == []
