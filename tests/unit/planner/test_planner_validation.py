"""Named sets for validation, and prompts: what the planner finds, resolves, prices and says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned import findings_of, plan_of, spec_of

from partool.report.plan_rows import job_rows
from partool.spec.judging import BestSpec
from partool.spec.loader import load_text

SPEC = """\
model: {layers: 2, hidden: 32, heads: 4, vocab: 256}
hardware: {accelerator: cpu, per_node: 2}
data:
  source: train.jsonl
  validation_sets: {code: code.jsonl, facts: {source: facts.jsonl, text_field: body}}
training: {sequence_length: 33, global_batch: 4, steps: 6, precision: fp32, validation: {every: 2, samples: 7}}
parallel: {compile: none, pipeline: {stages: 1}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records: dict[str, dict[str, Any]] = {
        "train": {"text": "one"},
        "code": {"text": "two"},
        "facts": {"body": "three"},
        "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    }
    for name, record in records.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(record) + "\n") * 20)
    return tmp_path


def codes(text: str, folder: Path) -> list[tuple[str, str]]:
    return [(one.code, ".".join(map(str, one.path))) for one in findings_of(text, folder=folder)]


def test_sets_are_resolved_by_their_own_records(folder: Path) -> None:
    plan = plan_of(SPEC, folder=folder)
    assert {name: (each.source, each.records, each.attend) for name, each in plan.data.validation_sets.items()} == {
        "code": (str(folder / "code.jsonl"), "text", "sequence"),
        "facts": (str(folder / "facts.jsonl"), "text", "sequence"),
    }
    assert plan.data.named["facts"].text_field == "body"
    row = dict(job_rows(plan))["Validation"]
    assert row.startswith("sets code (texts), facts (texts); at most 7 sequences of each every 2 steps, about ")


def test_the_time_of_a_validation_grows_with_sets_and_prompts(folder: Path) -> None:
    def seconds(*overrides: str) -> float:
        totals = plan_of(SPEC, *overrides, folder=folder).prediction.totals
        assert totals is not None
        assert totals.validation_s is not None
        return totals.validation_s

    two = seconds()
    assert seconds("data.validation=0.5") == pytest.approx(1.5 * two)
    assert seconds("training.ema=0.9", "training.ema.validation=both") == pytest.approx(2 * two)
    four, eight = (seconds("training.validation.prompts=[a, b]", f"training.validation.new_tokens={n}") for n in (4, 8))
    assert eight - two == pytest.approx(2 * (four - two))
    assert four > two


def test_what_a_set_cannot_be_is_named_with_its_place(folder: Path) -> None:
    assert codes(SPEC.replace("code: code", "code: none"), folder) == [("PT601", "data.validation_sets.code.source")]
    assert ("PT295", "data.validation_sets.code") in codes(SPEC.replace("code: code", "code: pairs"), folder)
    assert codes(SPEC.replace("code: code", "'a/b': code"), folder)[0][0] == "PT106"


def test_figures_of_sets_are_judged(folder: Path) -> None:
    assert codes(SPEC + "checkpoint: {best: facts/perplexity}\n", folder) == []
    (found,) = findings_of(SPEC + "checkpoint: {best: fact/loss}\n", folder=folder)
    assert (found.code, found.path) == ("PT410", ("checkpoint", "best", "metric"))
    assert found.help == "use loss, code/loss, code/perplexity, facts/loss, facts/perplexity"
    tasks = SPEC + "evaluation: {tasks: [mine]}\n"
    assert codes(tasks + "checkpoint: {best: mine/acc}\n", folder) == []
    assert codes(tasks + "checkpoint: {best: fact/loss}\n", folder) == [("PT410", "checkpoint.best.metric")]
    assert (BestSpec(metric="code/loss").better, BestSpec(metric="pairs/accuracy").better) == ("min", "max")


def test_prompts_need_a_validation_a_tokenizer_and_room(folder: Path) -> None:
    def with_prompts(prompts: str, text: str = SPEC) -> str:
        return text.replace("samples: 7", f"samples: 7, prompts: {prompts}")

    assert codes(with_prompts("[Hello]"), folder) == []
    none = "\n".join(line for line in SPEC.splitlines() if "validation_sets" not in line).replace("every: 2, ", "")
    assert codes(with_prompts("[Hello]", none), folder) == [("PT425", "training.validation.prompts")]
    messages = "[[{role: user, content: Hello}]]"
    assert codes(with_prompts(messages), folder) == [("PT426", "training.validation.prompts.0")]
    assert codes(with_prompts(f"[a, {'b' * 33}]"), folder) == [("PT637", "training.validation.prompts.1")]
    moving = with_prompts("[a]").replace("stages: 1", "stages: 2, schedule: weipipe")
    assert ("PT427", "training.validation.prompts") in codes(moving, folder)
    too_many = load_text(with_prompts("[a]").replace("prompts", "new_tokens: 65, prompts"))
    assert [one.path for one in too_many.diagnostics] == [("training", "validation", "new_tokens")]
    assert spec_of(with_prompts("[a]")).training.sees_positions
