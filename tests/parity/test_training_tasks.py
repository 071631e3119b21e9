"""Tasks within a training: scored with the average of the weights, followed by the best checkpoint, in float64.

The process of the tasks is a stand-in without lm_eval. Two ranks are stopped while tasks run and go on in another
layout; their figures are those that one process computes from the averages in their checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tasks_process import ROWS, SCORED
from _tasks_worker import train_judged
from _tensor_plans import FIVE, ONE, tensor_plan
from test_tasks import log_likelihoods

from partool.cli.main import run as command
from partool.plan.layout import Mesh
from partool.plan.run import RunStatus, write_status
from partool.plan.types import Plan
from partool.plan.validations import read_validations
from partool.spec.averaging import EmaSpec
from partool.spec.data import ValidationSet
from partool.spec.evaluation import EvaluationSpec
from partool.spec.judging import BestSpec, EarlyStop
from partool.spec.training import CheckpointSpec
from partool_runtime.weights import build, materialise

STEPS, EVERY, STOP = 4, 2, 2
TWO = Mesh(dp_shard=2)


def judged_plan(folder: Path, mesh: Mesh, zero: int, tasks: tuple[str, ...] = ("squares",)) -> Plan:
    """Return a plan of four steps, each of which is validated, with tasks after the second and the last one."""
    training = {
        "ema": EmaSpec(decay=0.3, validation="average"),
        "validation": {"every": 1, "samples": 5},
        "early_stop": EarlyStop(metric="words/loss", patience=STEPS),
    }
    plan = tensor_plan(folder / "text", mesh, model=FIVE, settings={"zero": zero, "steps": STEPS}, training=training)
    sets = {"words": ValidationSet(source=str(folder / "words.txt"))}
    return plan.model_copy(
        update={
            "data": plan.data.model_copy(update={"validation_sets": sets}),
            "evaluation": EvaluationSpec(tasks=list(tasks), every=EVERY),
            "checkpoint": CheckpointSpec(every=0, keep=1, best=BestSpec(metric="squares/sum")),
        }
    )


@pytest.fixture(scope="module")
def jobs(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Return the runs: two ranks that are stopped and go on in another layout, and tasks that fail the second time."""
    folder = tmp_path_factory.mktemp("home") / "runs"
    folder.mkdir()
    write_text(folder / "text")
    (folder / "words.txt").write_text("a cat sat on a mat, and the mat was flat. " * 2)
    jobs = Jobs(folder, pools, train_judged)
    jobs.train("stopped", judged_plan(folder, TWO, 3), run="ranks", stop_at=STOP)
    jobs.train("ranks", judged_plan(folder, Mesh(tp=2), 0), run="ranks", resume=True)
    jobs.train("breaks", judged_plan(folder, TWO, 1, ("squares", "breaks")), run="breaks")
    return jobs


def expected(jobs: Jobs, kind: str) -> dict[int, dict[str, float]]:
    """Return the figures of the tasks by step, in one process, from the weights or averages in checkpoints."""
    plan = judged_plan(jobs.folder, ONE, 0)
    figures = {}
    for step in (EVERY, STEPS):
        model = build(plan.model).to(torch.float64)
        materialise(model, "cpu")
        state = {n.removeprefix(kind): x for n, x in jobs.state("ranks", step).items() if n.startswith(kind)}
        model.load_state_dict(state)
        values, _ = log_likelihoods(model, ROWS, SCORED)
        figures[step] = {"squares/sum": sum(values), "squares/first": values[0]}
    return figures


@pytest.mark.timeout(240)
def test_tasks_judge_the_average_in_each_layout_and_after_a_stop(jobs: Jobs) -> None:
    assert "Preempted" in jobs.ended("stopped")
    assert f"after step {STOP}" in jobs.ended("stopped", rank=1)
    assert [jobs.ended(name) for name in ("ranks", "breaks")] == ["done"] * 2
    of_average, of_weights = expected(jobs, "ema."), expected(jobs, "model.")
    for step in (EVERY, STEPS):
        assert abs(of_average[step]["squares/sum"] - of_weights[step]["squares/sum"]) > 1e-6
    events = jobs.events("ranks", "evaluation")
    assert [event["step"] for event in events] == [EVERY, STEPS]
    for event in events:
        assert event["tasks"] == pytest.approx(of_average[event["step"]], abs=1e-10)
    assert jobs.events("ranks", "evaluation", rank=1) == []


def test_the_best_checkpoint_follows_a_figure_of_tasks(jobs: Jobs) -> None:
    figures = {step: each["squares/sum"] for step, each in expected(jobs, "ema.").items()}
    best = max(figures, key=figures.__getitem__)
    assert best == EVERY, "the last checkpoint is kept anyway"
    saved = sorted(path.name for path in (jobs.folder / "ranks" / "checkpoints").glob("step-*"))
    assert saved == [f"step-{best:08d}", f"step-{STEPS:08d}"]
    rows = read_validations(jobs.folder / "ranks" / "checkpoints").rows
    assert [row.step for row in rows] == [1, 2, 3, 4]
    judged = {row.step: row.figures["squares/sum"] for row in rows if "squares/sum" in row.figures}
    assert judged == pytest.approx(figures, abs=1e-10)
    assert all({"loss", "words/loss"} <= row.figures.keys() for row in rows)
    assert jobs.events("ranks", "warning") == [], "words/loss is no figure of a task"


def test_a_failure_of_the_tasks_lets_the_training_go_on(jobs: Jobs) -> None:
    (event,) = jobs.events("breaks", "evaluation")
    assert event["step"] == EVERY
    (warning,) = [each["message"] for each in jobs.events("breaks", "warning")]
    assert warning == "PT641: the task breaks; the training goes on without tasks"
    rows = read_validations(jobs.folder / "breaks" / "checkpoints").rows
    assert [("squares/sum" in row.figures, "loss" in row.figures) for row in rows] == [
        (False, True), (True, True), (False, True), (False, True),
    ]  # fmt: skip


def test_commands_show_the_latest_figures(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = jobs.folder / "ranks"
    monkeypatch.setenv("PARTOOL_HOME", str(jobs.folder.parent))
    write_status(home, RunStatus(state="done", created=1.0, exit_code=0))
    (home / "plan.json").write_text(judged_plan(jobs.folder, Mesh(tp=2), 0).to_json())
    latest = expected(jobs, "ema.")[STEPS]

    def shown(*words: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            command(list(words))
        assert ended.value.code in (0, None)
        return capsys.readouterr().out

    sentence = f"squares: sum {latest['squares/sum']:.4g} ± 0.5, first {latest['squares/first']:.4g}"
    for name in ("status", "report"):
        text = " ".join(shown(name, "ranks").split())
        assert sentence in text, name
        assert f"(after step {STEPS})" in text, name
    data = json.loads(shown("report", "ranks", "--output", "json"))["evaluation"]
    assert data["steps"] == STEPS
    assert data["tasks"]["squares"]["metrics"]["sum"]["value"] == pytest.approx(latest["squares/sum"], abs=1e-10)
