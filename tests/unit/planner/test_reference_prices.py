"""Prices of a reference's passes and memory, rules about references, and the row of the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from _bounds import above
from _chat_case import folder
from planned import checked, plan_of, problem_of
from test_planner_bounds import wrong_on_memory

from partool.cost.training.traffic import traffic_bytes
from partool.layout.parameters import count, parameters
from partool.plan.types import Plan
from partool.planner.cost_job import cost_job
from partool.planner.data_counts import DataCounts
from partool.planner.search.price import Priced
from partool.planner.totals import reference_pass
from partool.report.plan_rows import job_rows
from partool.work.evaluation import forward_only

SPEC = """
model: {{layers: 4, hidden: 256, heads: 8, vocab: 512, max_position: 512}}
{adapter}
hardware: {{accelerator: h100-sxm, per_node: 4}}
training:
  sequence_length: 256
  global_batch: 16
  steps: 50
  objective: {{kind: dpo, reference: {reference}}}
parallel: {{tensor: 2, data: {{zero: {zero}}}, micro_batch: 2, recompute: none, compile: none}}
data: {{source: pairs.jsonl, tokenizer: tok}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("references")
    record = json.dumps({"prompt": "what is", "chosen": " the cat", "rejected": " the mat"})
    (place / "pairs.jsonl").write_text(f"{record}\n" * 20)
    folder(place / "tok")
    return place


def text(reference: str, zero: int = 1, adapter: str = "") -> str:
    return SPEC.format(reference=reference, zero=zero, adapter=adapter)


def parts(plan: Plan) -> tuple[float, float, int]:
    """Return forward and backward seconds, and the bytes of parameters."""
    prediction = plan.prediction
    return (
        prediction.time.terms_s["forward"],
        prediction.time.terms_s["backward"],
        prediction.memory.terms_bytes["parameters"],
    )


@pytest.mark.parametrize("zero", [1, 3])
def test_a_copy_is_one_more_forward_pass_and_one_more_model(place: Path, zero: int) -> None:
    kept, copied = (plan_of(text(each, zero), folder=place) for each in ("kept", "copy"))
    (forward, backward, held), (more_forward, same_backward, more_held) = parts(kept), parts(copied)
    assert more_forward == pytest.approx(2.0 * forward)
    assert same_backward == pytest.approx(backward, rel=1e-3)  # more gathers beside the passes slow them down a little
    # Two tensor ranks share the matrices, and with ZeRO-3 two more share these.
    whole = 2 * count(parameters(kept.model)) / 2
    assert more_held - held == pytest.approx(whole / (2 if zero == 3 else 1), rel=0.02)
    assert copied.prediction.time.step_time_s > kept.prediction.time.step_time_s
    assert kept.prediction.memory.terms_bytes["optimizer"] == copied.prediction.memory.terms_bytes["optimizer"]


@pytest.mark.parametrize("zero", [1, 3])
def test_an_adapter_that_is_switched_off_takes_a_forward_pass_and_no_memory(place: Path, zero: int) -> None:
    kept, off = (plan_of(text(each, zero, "adapter: {rank: 4}"), folder=place) for each in ("kept", "adapter_off"))
    (forward, backward, held), (more_forward, same_backward, same_held) = parts(kept), parts(off)
    assert (more_forward, same_backward, same_held) == pytest.approx((2.0 * forward, backward, held), rel=1e-3)
    job = cost_job(problem_of(text("kept", zero, "adapter: {rank: 4}"), folder=place), "none")
    once, again = traffic_bytes(job, kept.layout), traffic_bytes(forward_only(job), kept.layout)
    assert again["tensor"] > 0
    sent = off.prediction.time.traffic_bytes
    assert sent["tensor"] == once["tensor"] + again["tensor"]
    assert sent["gradient_sync"] == once["gradient_sync"]
    assert sent["parameter_gather"] == once["parameter_gather"] + (again["parameter_gather"] if zero == 3 else 0)


def test_what_is_kept_is_in_the_totals(place: Path) -> None:
    plan = plan_of(text("kept"), folder=place)
    time, totals = plan.prediction.time, plan.prediction.totals
    assert totals is not None
    assert totals.reference_s is not None
    steps = plan.training.steps
    assert time.total_s == pytest.approx(steps * time.step_time_s + totals.reference_s)
    assert time.device_hours == pytest.approx(time.total_s * 4 / 3600)
    # Data that nobody counted: as many sequences as the steps read, forward.
    least, most = steps * time.terms_s["forward"], steps * time.step_time_s
    assert least < totals.reference_s < most
    assert "one forward pass over the data" in dict(job_rows(plan))["Reference"]
    problem = problem_of(text("kept"), folder=place)
    best = Priced(problem, plan.layout)
    counted = reference_pass(problem, best, DataCounts(4000, rows=8, samples=19, documents=40))
    assert counted is not None
    assert counted.s == pytest.approx(totals.reference_s * 8 / (steps * 16))
    assert counted.file_bytes == 40 * 8
    for reference in ("copy", "adapter_off"):
        other = plan_of(text(reference, adapter="adapter: {rank: 4}"), folder=place)
        assert other.prediction.totals is not None
        assert other.prediction.totals.reference_s is None
        assert other.prediction.time.total_s == pytest.approx(steps * other.prediction.time.step_time_s)
        assert "one more forward pass in every step" in dict(job_rows(other))["Reference"]


@pytest.mark.parametrize(
    ("reference", "adapter", "code"),
    [
        ("adapter_off", "", "PT421"),
        ("adapter_off", "adapter: {train: [head]}", "PT422"),
        ("adapter_off", "adapter: {rank: 4}", ""),
        ("copy", "adapter: {train: [head]}", ""),
        ("kept", "adapter: {train: [head]}", ""),
    ],
)
def test_references_that_the_model_cannot_have(place: Path, reference: str, adapter: str, code: str) -> None:
    findings = [each.code for each in checked(text(reference, adapter=adapter), folder=place) if each.code != "PT663"]
    errors = [each for each in findings if each.startswith("PT42")]
    assert errors == ([code] if code else [])


@pytest.mark.long
@pytest.mark.parametrize("reference", ["copy", "adapter_off"])
def test_bounds_of_the_search_hold(place: Path, reference: str) -> None:
    """Least times are below the exact ones, and many layouts at once have the memory of each."""
    auto = re.sub(r"(?m)^parallel: .*$", "", text(reference, adapter="adapter: {rank: 4}"))
    problem = problem_of(auto, folder=place)
    assert above(problem, 7, 60) == []
    wrong, seen = wrong_on_memory(problem, 7, 60)
    assert wrong == []
    assert seen > 10
