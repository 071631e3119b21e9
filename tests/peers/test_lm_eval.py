"""Tasks of lm-evaluation-harness: log-likelihoods and metrics are those of its own class for transformers.

The package is looked for in ``PARTOOL_LM_EVAL`` (default ``build/lm_eval``, which ``make lm-eval`` writes), and then
among the installed ones. Data sets are local; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _lm_eval_case import LENGTH, write_model, write_tasks

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("PARTOOL_LM_EVAL", HERE.parents[1] / "build" / "lm_eval"))
LAYOUTS = {
    "one process": (1, ""),
    "tensor": (2, "tensor: 2, data: {zero: 0}"),
    "ZeRO-3": (2, "data: {zero: 3, shard: 2}"),
    "pipeline": (2, "pipeline: {stages: 2}"),
    "ring": (2, "sequence: {degree: 2, method: ring}"),
    "data": (2, "data: {zero: 0}"),
}
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (FOLDER / "lm_eval").exists() and importlib.util.find_spec("lm_eval") is None,
        reason=f"lm_eval is not in {FOLDER}: make lm-eval",
    ),
]


class Case:
    """A model, tasks, and what lm-evaluation-harness itself says of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, write_model(folder / "model")
        self.tasks = write_tasks(folder / "tasks")
        out = folder / "expected.json"
        command = [sys.executable, str(HERE / "_judge_lm_eval.py"), str(self.model), str(LENGTH), str(out)]
        subprocess.run([*command, *self.tasks], env=self.environment(), check=True, capture_output=True)
        self.expected: dict[str, Any] = json.loads(out.read_text())

    def environment(self) -> dict[str, str]:
        offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hf")}
        own = {"PYTHONPATH": str(FOLDER), "PARTOOL_HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **offline, **own}

    def partool(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "partool", "eval", str(self.model), *words]
        return subprocess.run(command, env=self.environment(), cwd=self.folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("lm_eval"))


def settings(layout: str) -> list[str]:
    ranks, parallel = LAYOUTS[layout]
    values = ["hardware.accelerator=cpu", f"hardware.per_node={ranks}", "training.global_batch=12"]
    values += [f"parallel={{{parallel}}}"] if parallel else []
    return [word for value in values for word in ("--set", value)]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_scores_and_metrics_are_those_of_its_own_model(layout: str, case: Case) -> None:
    ran = case.partool("--tasks", ",".join(case.tasks), "--output", "json", *settings(layout))
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    lines = (case.folder / "home" / "runs" / result["run"] / "evaluation.requests.jsonl").read_text().splitlines()
    scores = {(row["task"], row["document"], row["request"]): row for row in map(json.loads, lines)}
    expected = case.expected["requests"]
    assert len(scores) == len(expected) == 13 * 3 + 7
    for row in expected:
        response = row["response"]
        score = scores[row["task"], row["document"], row["request"]]
        rolling = not isinstance(response, list)
        assert score["log_likelihood"] == pytest.approx(response if rolling else response[0], abs=1e-9)
        assert rolling or score["greedy"] == response[1]
    for task, metrics in result["tasks"].items():
        for name, metric in metrics["metrics"].items():
            assert metric["value"] == pytest.approx(case.expected["results"][task][f"{name},none"], rel=1e-12)
            stderr = case.expected["results"][task][f"{name}_stderr,none"]
            assert metric["stderr"] == (None if stderr == "N/A" else pytest.approx(stderr, rel=1e-12))
    assert set(result["tasks"]["choice"]["metrics"]) == {"acc", "acc_norm"}
    assert set(result["tasks"]["rolling"]["metrics"]) == {"word_perplexity", "byte_perplexity", "bits_per_byte"}


def test_results_are_those_of_its_simple_evaluate(case: Case) -> None:
    """Metrics, their errors and counts, with the examples that a task asks for, and with two."""
    out = case.folder / "results.json"
    command = [sys.executable, str(HERE / "_judge_lm_eval_results.py"), str(out), *case.tasks]
    subprocess.run(command, env=case.environment(), check=True, capture_output=True)
    asked = json.loads(out.read_text())
    for each in asked.values():
        assert each["ours"] == each["theirs"]
    assert asked["None"]["ours"]["results"]["choice"] != asked["2"]["ours"]["results"]["choice"]


def test_what_cannot_be_asked_is_told(case: Case) -> None:
    generates = str(case.folder / "tasks" / "generates.yaml")
    for task, code, words in (
        (generates, "PT639", "lets the model generate text"),
        ("arc_esay", "PT539", "arc_esay cannot be loaded"),
        (str(case.folder / "nowhere.yaml"), "PT418", "there is no file"),
    ):
        ran = case.partool("--tasks", task, *settings("one process"))
        assert ran.returncode in (1, 78)
        assert code in ran.stderr + ran.stdout
        assert words in ran.stderr + ran.stdout


def test_without_the_package_the_extra_is_named(case: Case) -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        pytest.skip("lm_eval is installed")
    environment = case.environment() | {"PYTHONPATH": ""}
    command = [sys.executable, "-m", "partool", "eval", str(case.model), "--tasks", case.tasks[0]]
    ran = subprocess.run(
        [*command, *settings("one process")], env=environment, cwd=case.folder, capture_output=True, text=True
    )
    assert ran.returncode == 78
    assert "PT538" in ran.stderr + ran.stdout
    assert "pip install 'partool[eval]'" in ran.stderr + ran.stdout
