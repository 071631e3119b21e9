"""Plans of job: evaluate price and fit forward passes alone, and their search is as exact as that of training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_problems
from pydantic import ValidationError

from partool.cli.main import run
from partool.cost.training.peak import least_memory, least_memory_of_passes, rank_memories
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.planner.cost_job import cost_job
from partool.planner.elastic import job_of_plan
from partool.planner.kernels.choose import coverage
from partool.planner.make import PlanResult, make_plan
from partool.planner.problem import Problem
from partool.planner.rules.engine import with_engine_defaults
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import Priced, bounds_s, room
from partool.planner.search.solve import solve
from partool.planner.stopping import forecast
from partool.report.timeline import planned as planned_timeline
from partool.report.timeline import predicted_times
from partool.schedule import span_s
from partool.schedule.transform import forward_only
from partool.spec.spec import Spec

CPU = {"accelerator": "cpu", "per_node": 2, "memory_gib": 8}
H100 = {"accelerator": "h100-sxm", "nodes": 1, "per_node": 8}
SMALL = {"layers": 3, "hidden": 96, "heads": 3, "vocab": 256}
ALIKE = {"offload": "none", "tensor": 1, "pipeline": {"stages": 1}, "sequence": {"degree": 1}, "data": {"zero": 3}}
ABSENT_TERMS = ("backward", "gradient_sync", "optimizer", "offload")
ABSENT_BYTES = ("gradients", "optimizer")


def planned(job: str = "evaluate", **sections: Any) -> PlanResult:
    document = {"job": job, "model": SMALL, "hardware": CPU, "data": "python-stdlib", **sections}
    return make_plan(Spec.model_validate(document), base_dir=Path("/"), default_name="case")


def plan_of(job: str = "evaluate", **sections: Any) -> Plan:
    result = planned(job, **sections)
    assert result.plan is not None, result.diagnostics
    return result.plan


@pytest.mark.parametrize("hardware", [CPU, H100], ids=["cpu", "h100"])
def test_nothing_goes_backward(hardware: dict[str, Any]) -> None:
    sizes = {"sequence_length": 192, "global_batch": 24}
    plan, trained = plan_of(hardware=hardware, training=sizes), plan_of("train", hardware=hardware, training=sizes)
    assert plan.job == "evaluate"
    time, memory = plan.prediction.time, plan.prediction.memory
    assert [time.terms_s[name] for name in ABSENT_TERMS] == [0.0] * len(ABSENT_TERMS)
    assert [memory.terms_bytes[name] for name in ABSENT_BYTES] == [0] * len(ABSENT_BYTES)
    assert time.traffic_bytes["gradient_sync"] == 0
    assert time.model_flops == pytest.approx(trained.prediction.time.model_flops / 3.0)
    assert time.step_time_s < trained.prediction.time.step_time_s
    assert memory.total_bytes < trained.prediction.memory.total_bytes
    assert memory.saved_bytes == 0
    assert set(plan.layout.recompute) == {"none"}


def test_a_model_is_evaluated_where_it_could_not_be_trained() -> None:
    sections: dict[str, Any] = {"model": "llama3-70b", "hardware": H100}
    assert planned("train", **sections, parallel=ALIKE).plan is None
    plan = plan_of(**sections, parallel=ALIKE)
    assert plan.prediction.memory.verdict == "green"
    assert plan.runnable


def problems(count: int) -> list[Problem]:
    """Return random problems of evaluations with at most 160 layouts."""
    found: list[Problem] = []
    for seed in range(1000):
        pick = random.Random(seed).choice
        made = random_problems.document(pick)
        made |= {"parallel": {}, "job": "evaluate", "limits": {"prefer": "fastest"}}
        if made["hardware"]["accelerator"] != "cpu":
            made["hardware"]["memory_gib"] = pick([1.5, 2, 4])
        problem = random_problems.problem_of(made)
        problem = Problem(with_engine_defaults(problem.spec), problem.model, problem.devices)
        if 20 <= random_problems.layouts_of(problem) <= 160:
            found.append(problem)
        if len(found) == count:
            break
    return found


def test_the_search_finds_the_fastest_and_bounds_hold() -> None:
    both = False
    for problem in problems(3):
        space = build(problem)
        groups, policies = np.meshgrid(np.arange(space.size), np.arange(len(space.policies)), indexing="ij")
        allowed = space.allowed(groups.ravel(), policies.ravel())
        rows = space.rows(groups.ravel()[allowed], policies.ravel()[allowed])
        bounds, needs = bounds_s(problem, rows), room(problem, rows)
        job = cost_job(problem)
        passes_bytes, _ = least_memory_of_passes(job, rows)
        assert (least_memory(job, rows) <= np.asarray(needs.total_bytes) + 1).all()
        assert (passes_bytes <= np.asarray(needs.total_bytes) + 1).all()
        every = [Priced(problem, layout_of(problem, rows.take(at))) for at in range(len(bounds))]
        times = np.array([priced.step_time_s for priced in every])
        assert (bounds <= times * (1.0 + 1e-9)).all()
        scores = [priced.score_s for priced in every if priced.fits]
        both |= 0 < len(scores) < len(every)
        best = solve(problem).overall.best
        if scores:
            assert best is not None
            assert best.score_s <= min(scores) * (1.0 + 1e-9)
        else:  # where nothing fits, constraints are relaxed
            assert best is None or best.problem.relaxed
    assert both, "some layouts are to fit, and some not"


@pytest.mark.parametrize(
    ("sections", "code", "path"),
    [
        ({"optimizer": {"lr": 1e-3}}, "PT289", ("optimizer", "lr")),
        ({"checkpoint": {"keep": 2}}, "PT289", ("checkpoint", "keep")),
        ({"training": {"validation": {"every": 5}}}, "PT289", ("training", "validation", "every")),
        ({"model": SMALL | {"frozen": ["embed.*"]}}, "PT289", ("model", "frozen")),
        ({"parallel": {"recompute": "full"}}, "PT290", ("parallel", "recompute")),
        ({"parallel": {"offload": {"optimizer": "cpu"}}}, "PT290", ("parallel", "offload", "optimizer")),
        ({"parallel": {"pipeline": {"schedule": "1f1b"}}}, "PT290", ("parallel", "pipeline", "schedule")),
        ({"engine": "deepspeed"}, "PT290", ("engine",)),
    ],
)
def test_what_only_training_reads_is_refused(sections: dict[str, Any], code: str, path: tuple[str, ...]) -> None:
    result = planned(**sections)
    assert result.plan is None
    assert (code, path) in [(finding.code, finding.path) for finding in result.diagnostics]


def test_random_weights_are_doubted_and_trained_ones_are_not(tmp_path: Path) -> None:
    assert "PT291" in [finding.code for finding in planned().diagnostics]
    weights = {"source": "checkpoint", "path": str(tmp_path)}
    assert "PT291" not in [finding.code for finding in planned(model=SMALL | {"weights": weights}).diagnostics]


def test_the_screen_has_no_rows_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "job: evaluate\nmodel: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: cpu}\n"
    )
    spec.write_text(spec.read_text() + "data: python-stdlib\n")
    with pytest.raises(SystemExit):
        run(["plan", str(spec)])
    screen = capsys.readouterr().out
    assert "\nEvaluation " in screen
    for row in ("Optimizer", "Checkpoint", "Training"):
        assert f"\n{row} " not in screen
    assert "the spec asks for it" not in screen
    with pytest.raises(SystemExit) as refused:
        run(["plan", str(spec), "--verify"])
    assert refused.value.code == 1
    assert "PT290" in capsys.readouterr().err


def test_views_of_a_plan_show_forward_passes_alone() -> None:
    pipeline = {**ALIKE, "pipeline": {"stages": 2}, "data": {"zero": 0}}
    plan = plan_of(model=SMALL | {"layers": 4}, hardware=H100, parallel=pipeline, training={"global_batch": 16})
    assert {line.asked.part for line in coverage(plan).lines} <= {"forward", "both"}
    times = predicted_times(plan)
    assert all(second > 0 for second in times.forward_s)
    assert all(second == 0 for second in times.backward_s)
    work = job_of_plan(plan, plan.devices)
    assert not work.backward
    assert rank_memories(work, plan.layout)[0].terms["gradients"] == 0


def test_a_plan_file_has_what_its_job_reads() -> None:
    plan, trained = plan_of(), plan_of("train")
    document, of_training = json.loads(plan.to_json()), json.loads(trained.to_json())
    assert of_training.keys() - document.keys() == {"optimizer", "checkpoint", "resume"}
    assert of_training["training"].keys() - document["training"].keys() == {
        "adversarial", "validation", "max_nonfinite_steps", "z_loss", "objective", "early_stop", "ema", "distill",
        "multi_token_weight",
    }  # fmt: skip
    for one in (plan, trained):
        read = Plan.from_json(one.to_json())
        assert (read, read.hash) == (one, one.hash)
    for name in ("optimizer", "checkpoint"):
        with pytest.raises(ValidationError, match="Field required"):
            Plan.from_json(json.dumps({key: value for key, value in of_training.items() if key != name}))


PIPED = {**ALIKE, "pipeline": {"stages": 2}, "data": {"zero": 0}, "micro_batch": 1}
PASSES = ("forward", "tensor_parallel", "sequence_parallel", "expert_parallel", "pipeline_bubble")


def test_a_pipeline_keeps_nothing_of_earlier_micro_batches() -> None:
    few, many = (
        plan_of(model=SMALL | {"layers": 4}, hardware=H100, parallel=PIPED, training={"global_batch": batch})
        for batch in (16, 256)
    )
    assert many.layout.derived.accumulation == 16 * few.layout.derived.accumulation
    assert many.prediction.memory.terms_bytes == few.prediction.memory.terms_bytes


def test_a_pipeline_waits_for_no_gradients() -> None:
    plan = plan_of(model=SMALL | {"layers": 4}, hardware=H100, parallel=PIPED, training={"global_batch": 64})
    schedule, times = forward_only(schedule_of(plan.layout)), predicted_times(plan)
    terms_s = plan.prediction.time.terms_s
    assert sum(terms_s[name] for name in PASSES) == pytest.approx(span_s(schedule, times))
    assert planned_timeline(plan, 10_000).span_s == pytest.approx(span_s(schedule, times))
    assert span_s(schedule, times) < span_s(schedule_of(plan.layout), times)


def test_half_of_a_trainings_traffic_goes_forward() -> None:
    def sent(job: str, **parallel: Any) -> dict[str, int]:
        layout = {**ALIKE, "data": {"zero": 0}, "micro_batch": 1, "recompute": "none", **parallel}
        sizes = {"global_batch": 16, "sequence_length": 64}
        plan = plan_of(job, model=SMALL | {"layers": 4, "heads": 4}, hardware=H100, parallel=layout, training=sizes)
        return plan.prediction.time.traffic_bytes

    stages = {"pipeline": {"stages": 4, "schedule": "gpipe"}}
    assert 2 * sent("evaluate", **stages)["pipeline"] == sent("train", **stages)["pipeline"] > 0
    shares = sent("evaluate", tensor=2)["tensor"] / sent("train", tensor=2)["tensor"]
    assert shares == pytest.approx(0.5, abs=0.05)


def test_data_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("0123456789" * 200)
    sections = {"data": str(tmp_path), "training": {"global_batch": 4, "sequence_length": 64, "steps": 1000}}
    prediction = plan_of(**sections).prediction
    assert prediction.totals is not None
    tokens = prediction.totals.data_tokens
    assert tokens is not None
    assert 1900 < tokens < 2100
    assert prediction.totals.trained_tokens == tokens
    assert prediction.time.total_s == pytest.approx(math.ceil(tokens / 256) * prediction.time.step_time_s)


def test_what_a_stop_loses_are_steps_of_the_log() -> None:
    expected = forecast(plan_of(training={"log_every": 7}))
    assert (expected.saves, expected.loss) == (True, "up to 7 steps")
