"""``partool init``: the spec it writes loads and has the editor's schema line; no file is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partool.cli.main import run
from partool.spec import load


def init(*arguments: str) -> int:
    try:
        run(["init", *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


@pytest.mark.parametrize("preset", [[], ["--preset", "llama3-8b"]])
def test_what_is_written_loads(tmp_path: Path, preset: list[str]) -> None:
    path = tmp_path / "new.yaml"
    assert init(str(path), *preset) == 0
    assert "yaml-language-server: $schema=" in path.read_text()
    loaded = load(path)
    assert loaded.diagnostics == []
    assert loaded.spec is not None


def test_a_spec_for_fine_tuning_names_model_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "my model"
    model.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
              "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 512}  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text("{}")
    data = tmp_path / "a.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n')
    path = tmp_path / "new.yaml"
    assert init(str(path), "--finetune", str(model), "--data", str(data)) == 0
    assert "next: partool data prepare" in capsys.readouterr().err
    spec = load(path).spec
    assert spec is not None
    assert (spec.model.config, spec.model.weights.path, spec.data.source) == (
        "my model/config.json",
        "my model",
        "a.jsonl",
    )
    assert (spec.training.sequence_length, spec.training.epochs) == (512, 3)
    assert "records: chat" in path.read_text()
    config["model_type"] = "unheard-of"
    (model / "config.json").write_text(json.dumps(config))
    assert init(str(path), "--finetune", str(model), "--data", str(data), "--force") == 0
    spec = load(path).spec
    assert spec is not None
    assert spec.model.hf == "my model"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--finetune", "m"], "--finetune and --data go together"),
        (["--finetune", "m", "--data", "a.jsonl"], "m is no model's folder"),
        (["--finetune", ".", "--data", "none.jsonl"], "none.jsonl"),
        (["--finetune", ".", "--data", "odd.jsonl"], "odd.jsonl:1 has no key 'text' (its keys: question)"),
    ],
)
def test_what_cannot_be_fine_tuned_is_said(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("config.json", "{}"), ("tokenizer.json", "{}"), ("odd.jsonl", '{"question": 1}\n')):
        (tmp_path / name).write_text(text)
    assert init("new.yaml", *arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new.yaml").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert init(str(path)) == 2
    assert path.read_text() == "mine"
    assert init(str(path), "--force") == 0
    assert path.read_text() != "mine"
    assert init(str(tmp_path / "x.yaml"), "--preset", "lama3-8b") == 2
    assert "llama3-8b" in capsys.readouterr().err
