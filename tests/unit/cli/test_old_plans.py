"""``partool plan --against`` and ``--diff`` with a plan that was made before plans recorded their scores."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import typer
from _golden import fixed_machine, result_of
from planned import plan_of
from rich.console import Console

from partool.cli._load import Output
from partool.cli.main import run
from partool.cli.plan import _against
from partool.cost.evidence import pair_error
from partool.plan.types import Plan
from partool.planner.explain.scored import rescored
from partool.planner.search.score import KAPPA
from partool.report.tables import render_comparison

FOLDER = Path(__file__).parents[2] / "data" / "before-scores"
"""A spec and its plan, made by the last version without scores; its tables and reasons are left out."""
OLD = Plan.from_json((FOLDER / "plan.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def now() -> Plan:
    with fixed_machine():
        return plan_of((FOLDER / "spec.yaml").read_text(encoding="utf-8"), name="spec")


def said(capfd: pytest.CaptureFixture[str], old: Plan, new: Plan, output: Output = "text") -> tuple[int, str]:
    """Return the exit code and the output of ``partool plan --against``."""
    try:
        _against(old, new, output)
    except typer.Exit as ended:
        return ended.exit_code, capfd.readouterr().out
    return 0, capfd.readouterr().out


def without_score(plan: Plan, **figures: float) -> Plan:
    """Return a plan as it was before scores, with other figures of its time."""
    time = plan.prediction.time.model_copy(update=figures)
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"time": time, "score": None})})


def test_what_moved_since_an_old_plan_is_told(now: Plan, capfd: pytest.CaptureFixture[str]) -> None:
    """The layout, seconds, GiB and the terms of the score; the old plan's score is made from its own figures."""
    assert OLD.prediction.score is None
    code, out = said(capfd, OLD, now)
    assert code == 10
    assert "layout.data.zero: 2 → 3" in out
    assert re.search(r"^step time: 14\.\d s → 14\.\d s \([-+]\d+\.\d%\)$", out, re.MULTILINE)
    assert re.search(r"^memory: 68\.\d GiB → 5\d\.\d GiB \(-\d+\.\d%\)$", out, re.MULTILINE)
    assert re.search(r"^score: 1\d\.\d s → 14\.\d s \(-\d+\.\d%\)$", out, re.MULTILINE)
    assert re.search(r"^shares of the score: not fitting \d+\.\d\d% → 0\.\d\d%, filled memory ", out, re.MULTILINE)
    score = {row["name"]: row for row in json.loads(said(capfd, OLD, now, "json")[1])["score"]}
    unfit = 1.0 - OLD.prediction.memory.fit_probability
    assert score["not fitting"]["old"] == pytest.approx(KAPPA * unfit)
    assert score["score_s"]["old"] > OLD.prediction.time.step_time_s * (1.0 + KAPPA * unfit)
    assert score["score_s"]["new"] < score["score_s"]["old"]
    render_comparison(OLD, now, Console(file=(table := io.StringIO()), width=80))
    assert re.search(r"^not fitting +\d\.\d\d% +0\.\d\d%$", table.getvalue(), re.MULTILINE)


def test_an_old_plan_is_read_from_its_file(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["plan", str(FOLDER / "plan.json"), "--against", str(FOLDER / "plan.json")])
    assert ended.value.code == 0
    assert capfd.readouterr().out == ""


def test_a_plan_that_runs_the_same_tells_moved_figures(now: Plan, capfd: pytest.CaptureFixture[str]) -> None:
    assert said(capfd, now, now) == (0, "")
    code, out = said(capfd, without_score(now, step_time_s=2.0 * now.prediction.time.step_time_s), now)
    assert code == 0
    assert re.fullmatch(r"step time: .* \(-50\.0%\)\nscore: .* \(-50\.0%\)\n", out)


def test_a_score_made_anew_is_that_of_the_search(now: Plan) -> None:
    """Plans of ZeRO alone and with an offloaded optimizer, and the same plans without their scores."""
    with fixed_machine():
        offloaded = result_of("superchip-open").plan
    assert offloaded is not None
    assert offloaded.prediction.score is not None
    assert offloaded.prediction.score.shares["an offloaded optimizer"] == pair_error("offload_optimizer")
    for plan in (now, offloaded):
        score, made = plan.prediction.score, rescored(without_score(plan))
        assert score is not None
        assert made is not None
        assert made.score_s == pytest.approx(score.score_s, rel=1e-9)
        assert made.shares == pytest.approx(score.shares)
    assert rescored(without_score(now).model_copy(update={"spec": {"model": 7}})) is None
