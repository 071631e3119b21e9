"""The whole trainer on two ranks: resume, stop requests, other layouts, refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from _jobs import Jobs
from _plans import small_plan, write_text
from _ranks import Pools

from partool.spec.model import Weights
from partool_runtime.model import Decoder
from partool_runtime.weights import fill

STEPS = 6


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> Jobs:
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text"
    write_text(text)
    jobs = Jobs(folder, pools)
    for precision, zero in (("fp32", 1), ("bf16", 3), ("fp16", 2)):
        plan = small_plan(text, zero=zero, precision=precision)
        jobs.train(f"{precision} unbroken", plan, run=f"{precision}-unbroken")
        jobs.train(f"{precision} stopped", plan, run=precision, stop_at=3)
        jobs.train(f"{precision} resumed", plan, run=precision, resume=True)
    jobs.train("again", small_plan(text), run="fp32", resume=True)
    double = partial(small_plan, text, precision="fp64")
    jobs.train("fresh", double(), run="crossed", resume=True)
    jobs.train("zero-3", double(zero=3, steps=8), run="crossed", resume=True)
    jobs.train("long", double(steps=10, accumulation=1), run="long")
    jobs.train("tied", small_plan(text, zero=3, model={"tied_embeddings": True}, recompute="full"), run="tied")
    frozen = small_plan(text, zero=2).model_copy(update={"frozen": ("layers.0.*", "embed.weight")})
    jobs.train("frozen", frozen, run="frozen")
    jobs.train("other data", small_plan(text, steps=9, training={"seed": 5}), run="fp32", resume=True)
    jobs.train("one rank", double(ranks=1, steps=10), run="crossed", resume=True)
    pools.close(2)  # a run that is refused keeps its claim on the checkpoints as long as its process lives
    other = {"hidden": 20, "head_dim": 4}
    jobs.train("other model", small_plan(text, ranks=1, steps=9, model=other), run="fp32", resume=True)
    return jobs


@pytest.mark.timeout(170)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resumed_run_equals_unbroken_run_bit_for_bit(ran, precision):
    assert ran.ended(f"{precision} unbroken") == "done"
    assert ran.ended(f"{precision} stopped") == "Preempted: stopped by SIGTERM after step 3"
    assert ran.ended(f"{precision} stopped", rank=1) == ran.ended(f"{precision} stopped")
    assert ran.ended(f"{precision} resumed") == "done"
    unbroken, resumed = ran.state(f"{precision}-unbroken", STEPS), ran.state(precision, STEPS)
    assert any(name.startswith("exp_avg_sq.layers.1") for name in unbroken)
    assert unbroken.keys() == resumed.keys()
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
    losses = [step["loss"] for step in ran.events(f"{precision}-unbroken", "step")]
    assert [step["loss"] for step in ran.events(precision, "step")][:STEPS] == losses
    assert ran.events(precision, "start")[1]["resumed_from"] == 3


@pytest.mark.timeout(170)
def test_comparison_can_fail(ran):
    a, b = ran.state("fp32-unbroken", STEPS), ran.state("fp32-unbroken", step=4)
    assert not all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.timeout(170)
def test_low_precision_stays_near_fp32(ran):
    losses = {p: [s["loss"] for s in ran.events(f"{p}-unbroken", "step")] for p in ("fp32", "bf16", "fp16")}
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=3e-2)
    assert losses["fp16"] == pytest.approx(losses["fp32"], abs=3e-3)
    assert len({tuple(values) for values in losses.values()}) == 3


@pytest.mark.timeout(170)
def test_finished_run_ends_at_once(ran):
    assert ran.ended("again") == "done"
    assert ran.events("fp32", "start")[2]["resumed_from"] == STEPS


@pytest.mark.timeout(170)
def test_resume_without_checkpoint_begins(ran):
    assert ran.ended("fresh") == "done"
    assert ran.events("crossed", "start")[0]["resumed_from"] == 0


@pytest.mark.timeout(170)
@pytest.mark.parametrize(("job", "step"), [("zero-3", 8), ("one rank", 10)])
def test_resume_in_another_layout_goes_on_as_if_unbroken(ran, job, step):
    assert ran.ended(job) == "done"
    assert [event["resumed_from"] for event in ran.events("crossed", "start")] == [0, 6, 8]
    long, crossed = ran.state("long", step=step), ran.state("crossed", step=step)
    assert long.keys() == crossed.keys()
    for name, expected in long.items():
        torch.testing.assert_close(crossed[name], expected, rtol=0, atol=1e-10, msg=name)


@pytest.mark.timeout(170)
def test_validation_and_learning(ran):
    losses = [event["loss"] for event in ran.events("tied", "validation")]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 5.7
    assert "model.head.weight" not in ran.state("tied", STEPS)


@pytest.mark.timeout(170)
def test_other_data_and_other_models_are_refused(ran):
    assert ran.ended("other data").startswith("ConfigurationError: PT616")
    assert ran.ended("other model").startswith("ConfigurationError: PT612")


@pytest.mark.timeout(170)
def test_frozen_parameters_keep_their_first_values_and_have_no_moments(ran):
    assert ran.ended("frozen") == "done"
    state, trained = ran.state("frozen", STEPS), ran.state("fp32-unbroken", STEPS)
    model = Decoder(small_plan(ran.folder / "text").model)
    fill(model, Weights(), seed=small_plan(ran.folder / "text").training.seed)
    first = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    kept = [name for name in first if torch.equal(state[name], first[name])]
    frozen = [name for name in first if name.startswith(("model.layers.0.", "model.embed."))]
    assert kept == frozen
    assert not [name for name in state if name.startswith(("exp_avg.layers.0.", "exp_avg.embed."))]
    assert not any(torch.equal(trained[name], first[name]) for name in frozen)  # unless frozen they move
