"""Errors of a plan: bars on either side, first runs beside tuned ones, and prices above the best published runs."""

from __future__ import annotations

from typing import Any

import pytest
from planned import problem_of

from partool.catalog.lookup import table
from partool.catalog.profile import Applied
from partool.catalog.profile_file import Scalar
from partool.catalog.published import PublishedMfu, published_mfu
from partool.cost.evidence import FIRST_RUN_SLOWDOWN, LEAST_ABOVE, LEAST_BELOW, step_error
from partool.plan.types import Prediction
from partool.planner.explain import errors
from partool.planner.search.price import Priced
from partool.planner.search.solve import solve
from partool.report.units import bars

SPEC = """\
model: llama3-8b
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {global_batch: 64, sequence_length: 4096}
parallel: {tensor: 1, pipeline: {stages: 1}, data: {zero: 3}, recompute: full, micro_batch: 2, compile: none}
"""


@pytest.fixture(scope="module")
def best() -> Priced:
    chosen = solve(problem_of(SPEC)).chosen
    assert chosen is not None
    return chosen


def prediction(best: Priced, evidence: errors.Evidence, slowdown: float = 0.0) -> Prediction:
    return Prediction(
        memory=best.memory,
        time=best.time,
        relative_error=evidence.error,
        relative_error_below=evidence.below,
        evidence=evidence.words,
        first_run_slowdown=slowdown,
        first_run_evidence="a reason",
    )


def test_bars_are_those_of_the_layout_and_first_runs_are_slower(best: Priced) -> None:
    unmeasured = Applied(best.problem.devices)
    evidence = errors.time_evidence(best, unmeasured)
    stated = step_error(best.layout, "torch", device=errors.DeviceClass("h100-sxm", "sm_90"))
    assert (evidence.error, evidence.below) == (stated.error, stated.below)
    assert evidence.error >= LEAST_ABOVE
    assert evidence.below >= LEAST_BELOW
    first = errors.first_run_of(best, unmeasured)
    assert first.slowdown >= FIRST_RUN_SLOWDOWN
    whole = prediction(best, evidence, first.slowdown)
    assert whole.first_run_step_s == pytest.approx(best.time.step_time_s * (1.0 + first.slowdown))
    assert bars(whole) == f"-{100 * evidence.below:.0f}/+{evidence.error:.0%}"
    assert bars(whole.model_copy(update={"relative_error_below": None})) == f"± {evidence.error:.0%}"
    texts = errors.sentences(best, whole)
    assert texts[0].startswith(f"Evidence: five in six runs take at most {evidence.error:.0%} longer, and at most ")
    assert texts[1] == f"First runs take {first.slowdown:.0%} longer: a reason."


def test_finished_runs_replace_both(best: Priced) -> None:
    """Runs on the machine are no first runs, and their spread narrows the bars on both sides."""
    measured = Applied(best.problem.devices, time=Scalar(value=1.0, n=9, spread=0.01))
    before, after = errors.time_evidence(best, Applied(best.problem.devices)), errors.time_evidence(best, measured)
    assert after.error < before.error
    assert after.below < before.below
    assert errors.first_run_of(best, measured).slowdown == 0.0


def test_a_price_above_the_best_published_run_is_said_and_may_be_longer(
    best: Priced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step time at its upper bar is longer by the ratio of both MFUs; the price itself stays."""
    unmeasured, mfu = Applied(best.problem.devices), best.time.mfu
    assert mfu is not None

    def stated(published: float, runs: int = 12) -> tuple[float, str]:
        known: Any = lambda accelerator, precision: PublishedMfu(published, "GPT 7B", "a table", runs)  # noqa: E731
        monkeypatch.setattr(errors, "published_mfu", known)
        evidence = errors.time_evidence(best, unmeasured)
        (text,) = (one for one in errors.sentences(best, prediction(best, evidence)) if one.startswith("MFU: "))
        return evidence.error, text

    usual, text = stated(1.01 * mfu)
    best_known = f"h100-sxm that partool knows is {1.01 * mfu:.1%} (GPT 7B, a table; the best of 12 runs in bf16)."
    assert text == f"MFU: {mfu:.1%}; the best published on {best_known}"
    wide, text = stated(mfu / 1.2)
    assert 1.0 + wide == pytest.approx(1.2 * (1.0 + usual))
    assert text.startswith(
        f"MFU: {mfu:.1%} is above the best published on h100-sxm that partool knows, {mfu / 1.2:.1%}"
    )
    few, text = stated(mfu / 1.2, runs=1)
    assert few == usual
    assert text.endswith("the best of 1 run in bf16, fewer than the 10 that would doubt a price).")


def test_published_figures_are_of_devices_that_the_catalog_has() -> None:
    rows = [published_mfu(name, precision) for name in table("accelerators") for precision in ("bf16", "fp8", "fp16")]
    stated = [one for one in rows if one is not None]
    assert len(stated) >= 8
    assert all(0.05 < one.mfu < 0.75 and one.source and one.runs > 0 for one in stated)
    assert published_mfu("no such device", "bf16") is None
