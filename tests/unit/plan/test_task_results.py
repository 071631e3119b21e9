"""Results of tasks: their text, their figures, and the file that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from partool.plan.evaluation_result import EVALUATION_FILE, EvaluationResult, read_result
from partool.plan.record import DamagedRecordError
from partool.plan.task_results import TaskMetric, TaskResult, task_figures, tasks_as_text
from partool.spec.judging import Judgement

TASKS = {
    "squares": TaskResult(
        documents=7, metrics={"acc": TaskMetric(value=0.5, stderr=0.189), "acc_norm": TaskMetric(value=0.25)}
    ),
    "prose": TaskResult(metrics={"word_perplexity": TaskMetric(value=None)}),
    "empty": TaskResult(),
}


def test_metrics_are_told_with_their_errors() -> None:
    assert tasks_as_text(TASKS) == (
        "squares: acc 0.5 ± 0.19, acc_norm 0.25; prose: word_perplexity not finite; empty: no metric"
    )


def test_figures_are_those_that_are_finite() -> None:
    assert task_figures(TASKS) == {"squares/acc": 0.5, "squares/acc_norm": 0.25}


def test_a_result_of_tasks_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = EvaluationResult.of_tasks(1200, TASKS)
    (tmp_path / EVALUATION_FILE).write_text(result.model_dump_json())
    assert read_result(tmp_path) == result
    assert str(result).endswith("; empty: no metric (after step 1,200)")
    (tmp_path / EVALUATION_FILE).write_text('{"steps": 1, "tokens": 0, "loss": null, "perplexity": null, "tasks": 3}')
    with pytest.raises(DamagedRecordError, match="tasks"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("metric", "better"),
    [("squares/acc", "max"), ("prose/word_perplexity", "min"), ("prose/bits_per_byte", "min"), ("loss", "min")],
)
def test_which_values_of_a_metric_are_better(metric: str, better: str) -> None:
    assert Judgement(metric=metric).better == better
