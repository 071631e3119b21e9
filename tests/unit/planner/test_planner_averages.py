"""Plans with a moving average, with the best checkpoints and with early stops."""

from __future__ import annotations

import pytest
from planned import findings_of, plan_of, result_of

from partool.plan.types import Plan
from partool.report.plan_rows import job_rows
from partool.strategies.optimizers import OPTIMIZERS

SPEC = """
model: {layers: 4, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 256}
hardware: {accelerator: h100-sxm, per_node: 4}
data: {source: python-stdlib, validation: 0.01}
training: {sequence_length: 64, global_batch: 64, steps: 100, precision: bf16, validation: {every: 10}}
parallel: {data: {zero: 1}, pipeline: 1, tensor: 1, sequence: 1, compile: none}
kernels: {mode: torch}
"""
FROZEN = "model.frozen=['layers.0.*']"


def terms(plan: Plan) -> dict[str, int]:
    return plan.prediction.memory.terms_bytes


@pytest.mark.parametrize("more", [(), ("parallel.data.zero=0",), (FROZEN,), ("optimizer.name=lamb",)])
def test_an_average_takes_as_much_as_one_moment(more: tuple[str, ...]) -> None:
    """It has a moment's elements: those of trained parameters, shared by as many ranks; nothing else changes."""
    without, averaged = plan_of(SPEC, *more), plan_of(SPEC, "training.ema=0.99", *more)
    moments = len(OPTIMIZERS[without.optimizer.name].moments)
    assert terms(without)["average"] == 0
    assert terms(averaged)["average"] == pytest.approx(terms(without)["optimizer"] / moments, abs=2)
    assert averaged.layout == without.layout
    assert {name: size for name, size in terms(averaged).items() if name not in ("average", "fragmentation")} == {
        name: size for name, size in terms(without).items() if name not in ("average", "fragmentation")
    }
    totals = [plan.prediction.totals for plan in (without, averaged)]
    assert totals[0] is not None
    assert totals[1] is not None
    trained = terms(without)["optimizer"] / moments / 4
    shared = 1 if averaged.layout.data.zero == 0 else 4
    more_bytes = totals[1].checkpoint_bytes - totals[0].checkpoint_bytes
    assert more_bytes == pytest.approx(4 * trained * shared, rel=1e-3)
    assert averaged.prediction.memory.saved_bytes > without.prediction.memory.saved_bytes
    assert averaged.prediction.time.terms_s["optimizer"] > without.prediction.time.terms_s["optimizer"]


@pytest.mark.parametrize(
    "more", [("parallel.offload.optimizer=cpu",), ("optimizer.name=zero_one_adam", "parallel.data.zero=0")]
)
def test_what_the_runtime_does_not_average(more: tuple[str, ...]) -> None:
    result = result_of(SPEC, "training.ema=0.99", *more)
    assert result.plan is not None, result.diagnostics
    assert "PT424" in result.plan.not_runnable
    assert "PT424" not in {each.code for each in result_of(SPEC, *more).diagnostics}


def test_the_screen_says_what_is_kept_and_that_a_run_may_end_early() -> None:
    rows = dict(job_rows(plan_of(SPEC, "checkpoint.best=loss", "checkpoint.every=50", "training.early_stop=3")))
    assert rows["Training"].startswith("at most 100 steps")
    assert rows["Checkpoint"].endswith("every 50 steps, the last 3 kept, and the best by loss")
    rows = dict(job_rows(plan_of(SPEC, "checkpoint.best.keep=2")))
    assert rows["Training"].startswith("100 steps")
    assert ", and the best 2 by loss" in rows["Checkpoint"]


@pytest.mark.parametrize(
    ("change", "code", "help"),
    [
        (("validation: 0.01", "validation: 0.0"), "PT409", "set data.validation, such as 0.01, and training: {valid"),
        (("{every: 10}", "{every: 0}"), "PT409", "set training: {validation: {every: 5}}"),
        (("best: loss", "best: accuracy"), "PT410", "use loss"),
        (("best: loss", "best: weights_loss"), "PT410", "use loss"),
    ],
)
def test_there_have_to_be_figures(change: tuple[str, str], code: str, help: str) -> None:
    text = SPEC + "checkpoint: {best: loss}\n"
    assert change[0] in text
    found = {each.code: each.help for each in findings_of(text.replace(*change))}
    assert found[code].startswith(help)
    assert code not in {each.code for each in findings_of(text)}
