"""Commands about a finished evaluation: its result, and what it cannot be used for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planned import plan_of

from partool.cli.main import run
from partool.plan.run import RunStatus, write_status

SPEC = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: cpu}\ndata: python-stdlib\n"
RESULT = {"steps": 7, "loss_sum": 20.0, "tokens": 1234, "loss": 2.5, "perplexity": 12.182494}


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "tiny-20260101-000000-abcd"
    folder.mkdir(parents=True)
    write_status(folder, RunStatus(state="done", created=1.0, exit_code=0))
    (folder / "plan.json").write_text(plan_of(SPEC + "job: evaluate\n").to_json())
    (folder / "evaluation.json").write_text(json.dumps(RESULT))
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        run(list(words))
    output = capsys.readouterr()
    return ended.value.code, output.out + output.err


@pytest.mark.parametrize("command", ["status", "report"])
def test_the_result_is_shown(evaluated: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, command, "tiny")
    assert code in (0, None)
    assert "loss 2.500000 nats per token, perplexity 12.1825, over 1,234 tokens" in " ".join(text.split())


def test_the_page_of_a_run_has_the_result(evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "run.html"
    said(capsys, "report", "tiny", "--html", str(page))
    assert "<p>loss 2.500000 nats per token, perplexity 12.1825, over 1,234 tokens</p>" in page.read_text()


def test_a_loss_that_is_not_finite_is_told(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (evaluated / "evaluation.json").write_text(json.dumps(RESULT | {"loss": None, "perplexity": None}))
    assert "the loss is not finite, over 1,234 tokens" in said(capsys, "status", "tiny")[1]


def test_nothing_is_exported(evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "export", "tiny", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "PT517" in text


def test_another_job_does_not_resume_it(evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "train.yaml"
    spec.write_text(SPEC)
    before = (evaluated / "status.json").read_text()
    code, text = said(capsys, "launch", "--resume", str(spec), "tiny")
    assert code == 1
    assert "PT517" in text
    assert (evaluated / "status.json").read_text() == before


TASKS = {"squares": {"documents": 7, "metrics": {"acc": {"value": 0.5, "stderr": 0.189}}}}


@pytest.mark.parametrize("command", ["status", "report"])
def test_metrics_of_tasks_are_shown(evaluated: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"steps": 0, "tokens": 0, "loss": None, "perplexity": None, "tasks": TASKS}
    (evaluated / "evaluation.json").write_text(json.dumps(result))
    assert "squares: acc 0.5 ± 0.19" in said(capsys, command, "tiny")[1]


def test_what_has_no_weights_is_not_evaluated(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "eval", "tiny")
    assert (code, "PT428" in text) == (1, True)
    code, text = said(capsys, "eval", "tiny", "--limit", "3")
    assert (code, "give --tasks" in text) == (2, True)
    (evaluated.parent / "model").mkdir()
    (evaluated.parent / "model" / "config.json").write_text("{}")
    code, text = said(capsys, "eval", str(evaluated.parent / "model"))
    assert (code, "--set data.source=FILES" in text) == (2, True)


def test_a_run_without_a_checkpoint_is_not_evaluated(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (evaluated / "plan.json").write_text(plan_of(SPEC).to_json())
    code, text = said(capsys, "eval", "tiny")
    assert code == 1
    assert "PT428" in text
    assert "no complete checkpoint" in text


def test_a_checkpoint_is_planned(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (evaluated / "plan.json").write_text(plan_of(SPEC).to_json())
    folder = evaluated / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    (folder / "file").write_text("")
    code, text = said(capsys, "eval", str(folder), "--tasks", "arc_easy", "--dry-run")
    assert code in (0, None), text
    assert "partool_runtime.agent" in text
