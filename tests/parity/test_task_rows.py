"""Rows of tasks as micro-batches, what the process of the tasks is told, and what is told of its failures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from _plans import small_plan

from partool.plan.types import Plan
from partool.spec.evaluation import EvaluationSpec
from partool_runtime.data.batches import IGNORED_LABEL
from partool_runtime.errors import ConfigurationError
from partool_runtime.jobs.tasks import task_batches
from partool_runtime.jobs.train.tasks import tasks_due
from partool_runtime.tasks import beside
from partool_runtime.tasks.messages import Scores, TaskSettings, Windows
from partool_runtime.tasks.process import metrics_of
from partool_runtime.tasks.tokens import open_tokens

ROWS = [list(range(1, 71)), [5, 6, 7, 8], [9, 8, 7], [3, 4], [2, 9]]
SCORED = [2, 3, 1, 1, 1]


def plan_of(**fields: Any) -> Plan:
    plan = small_plan(Path("unused"), ranks=2, training={"sequence_length": 200})
    return plan.model_copy(update={"evaluation": EvaluationSpec(tasks=["squares"], **fields)})


def ranks_of(place: int) -> Any:
    return SimpleNamespace(dp=SimpleNamespace(place=place, size=2))


def test_rows_are_as_long_as_the_longest_of_their_pass() -> None:
    plan = plan_of()
    size = plan.layout.micro_batch
    batches = [task_batches(plan, ranks_of(place), Windows.of(ROWS, SCORED)) for place in (0, 1)]
    assert [len(each) for each in batches] == [-(-5 // (2 * size))] * 2
    seen: dict[int, tuple[list[int], list[int]]] = {}
    for one, other in zip(*batches, strict=True):
        assert one.tokens_BS.shape == other.tokens_BS.shape
        for micro in (one, other):
            for place in range(size):
                labels = micro.labels_BS[place]
                at = (labels != IGNORED_LABEL).nonzero().flatten().tolist()
                seen[micro.first + place] = (micro.tokens_BS[place].tolist(), [*at, *labels[at].tolist()])
    assert batches[0][0].tokens_BS.shape[1] == 128, "69 tokens, rounded up"
    assert batches[0][-1].tokens_BS.shape[1] == (64 if size < 3 else 128)
    for row, (tokens, scored) in enumerate(zip(ROWS, SCORED, strict=True)):
        at = list(range(len(tokens) - 1 - scored, len(tokens) - 1))
        assert seen[row][0][: len(tokens) - 1] == tokens[:-1]
        assert seen[row][1] == [*at, *tokens[-scored:]]
    assert all(not labels for row, (_, labels) in seen.items() if row >= len(ROWS))


def test_where_layouts_fix_the_length_rows_are_sequences() -> None:
    plan = plan_of()
    compiled = plan.model_copy(update={"layout": plan.layout.model_copy(update={"compile": "block"})})
    assert task_batches(compiled, ranks_of(0), Windows.of(ROWS, SCORED))[0].tokens_BS.shape[1] == 200


def test_tasks_run_with_each_nth_validation_and_the_last() -> None:
    plan = plan_of(every=3)
    validation = plan.training.validation.model_copy(update={"every": 5})
    training = plan.training.model_copy(update={"steps": 37, "validation": validation})
    steps = [step for step in range(1, 38) if tasks_due(plan.model_copy(update={"training": training}), step)]
    assert steps == [15, 30, 37]
    assert not tasks_due(plan.model_copy(update={"evaluation": EvaluationSpec()}), 37)


def test_frames_give_back_what_they_were_made_of() -> None:
    windows, again = Windows.of(ROWS, SCORED), Windows.from_parts(Windows.of(ROWS, SCORED).parts())
    assert np.array_equal(windows.lengths_R2, again.lengths_R2)
    assert np.array_equal(windows.tokens, again.tokens)
    scores = Scores.from_parts(Scores(np.array([-1.5, -0.25]), np.array([True, False])).parts())
    assert (scores.log_likelihoods.tolist(), scores.greedy.tolist()) == ([-1.5, -0.25], [True, False])
    settings = TaskSettings(("a", "b"), None, 3, 0, "bytes", ("<x>",), 48)
    assert TaskSettings.from_json(settings.to_json()) == settings


def test_bytes_are_tokens() -> None:
    tokens = open_tokens("bytes", ())
    assert (tokens.encode("né", None), tokens.prefix) == ([110, 195, 169], 0)


def test_metrics_have_the_names_of_their_filters() -> None:
    row = {
        "alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict": 1, "f1,none": 0.25,
        "f1_stderr,none": "N/A",
    }  # fmt: skip
    assert metrics_of(row) == {
        "acc": {"value": 0.5, "stderr": 0.1},
        "exact_match,strict": {"value": 1.0, "stderr": None},
        "f1": {"value": 0.25, "stderr": None},
    }


def heard(plan: Plan, folder: Path) -> ConfigurationError:
    process = beside.TaskProcess(plan, folder)
    try:
        with pytest.raises(ConfigurationError) as failed:
            process.heard(60.0)
        return failed.value
    finally:
        process.close()


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    error = heard(plan_of(), tmp_path)
    assert (error.code, error.help) == ("PT538", "pip install 'partool[eval]'")


def test_a_process_that_ends_by_itself_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "MODULE", "no_such_module")
    error = heard(plan_of(), tmp_path)
    assert (error.code, "exit code 1" in error.message) == ("PT641", True)
    assert "no_such_module" in (tmp_path / "logs" / "attempt-1" / "tasks.log").read_text()
