"""Code in a model's folder runs only if the command line allows it, and only in the version that was allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from partool.spec.model_code import asked_code, code_hash
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.building import build_causal

PARTOOL = Path(sys.executable).with_name("partool")
CONFIG = {
    "model_type": "stranger", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 16,
    "auto_map": {
        "AutoConfig": "configuration_stranger.StrangerConfig",
        "AutoModelForCausalLM": "modeling_stranger.StrangerForCausalLM",
    },
}  # fmt: skip
FILES = {
    "configuration_stranger.py": """\
import os
open(os.environ["CANARY"], "a").write("x")
from transformers import LlamaConfig
class StrangerConfig(LlamaConfig):
    model_type = "stranger"
""",
    "modeling_stranger.py": """\
from transformers import LlamaForCausalLM
from .configuration_stranger import StrangerConfig
class StrangerForCausalLM(LlamaForCausalLM):
    config_class = StrangerConfig
""",
}
SPEC = """
name: stranger
model: {hf: model}
hardware: {accelerator: cpu, per_node: 1}
parallel: {micro_batch: 1, recompute: none, data: {zero: 0}}
training: {sequence_length: 16, global_batch: 1, steps: 1, precision: fp32}
data: {source: spec.yaml, format: text, cache: cache}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A spec beside a model with custom code."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    for name, text in FILES.items():
        (model / name).write_text(text)
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run partool with an endless "y" on its standard input."""
    environment = os.environ | {"PARTOOL_HOME": str(folder / "home"), "CANARY": str(folder / "canary")}
    answers = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    try:
        return subprocess.run(
            [str(PARTOOL), *arguments],
            cwd=folder, env=environment, stdin=answers.stdout, capture_output=True, text=True, check=False,
            timeout=150 * PATIENCE,
        )  # fmt: skip
    finally:
        answers.kill()
        answers.communicate()


@pytest.mark.timeout(400)
def test_code_runs_only_where_the_command_line_allows_it(folder: Path) -> None:
    canary = folder / "canary"
    done = run(folder, "plan", "spec.yaml")
    assert not canary.exists()
    assert done.returncode == 1
    assert "PT590" in done.stderr
    assert "StrangerForCausalLM of modeling_stranger.py" in " ".join(done.stderr.split())

    done = run(folder, "plan", "spec.yaml", "--trust-remote-code", "--out", "plan.json")
    assert done.returncode == 0, done.stderr
    assert canary.exists()
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["hf"]["code_hash"] == code_hash(folder / "model")

    canary.unlink()
    done = run(folder, "launch", "plan.json")
    assert done.returncode == 1
    assert "PT590" in done.stderr
    assert not canary.exists()


def test_no_other_code_than_was_allowed(folder: Path) -> None:
    allowed = code_hash(folder / "model")
    (folder / "model" / "modeling_stranger.py").write_text("raise SystemExit\n")
    with pytest.raises(ConfigurationError, match="the one that was allowed") as refused:
        build_causal(folder / "model", allowed)
    assert refused.value.code == "PT591"
    elsewhere = CONFIG | {"auto_map": {"AutoModelForCausalLM": "team/other--modeling.Stranger"}}
    (folder / "model" / "config.json").write_text(json.dumps(elsewhere))
    with pytest.raises(ConfigurationError, match="code of another repository") as refused:
        build_causal(folder / "model", code_hash(folder / "model"))
    assert refused.value.code == "PT590"


def test_hash_is_of_every_file_and_of_what_is_asked(folder: Path) -> None:
    model = folder / "model"
    assert asked_code(model) == {
        "StrangerConfig": "configuration_stranger.py", "StrangerForCausalLM": "modeling_stranger.py"
    }  # fmt: skip
    hashes = {code_hash(model)}
    (model / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 300}))
    assert code_hash(model) in hashes  # not a code file
    for change in (
        lambda: (model / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoConfig": "other--a.B"}})),
        lambda: (model / "modeling_stranger.py").write_text("x = 1\n"),
        lambda: (model / "modeling_stranger.py").rename(model / "other.py"),
        lambda: (model / "inner").mkdir() or (model / "inner" / "a.py").write_text(""),
    ):
        change()
        assert code_hash(model) not in hashes
        hashes.add(code_hash(model))
    assert asked_code(model) == {"B": "other--a"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"auto_map": 3}', '{"auto_map": {"A": [null, "a.B"]}}', "[" * 9999])
def test_configurations_of_any_form_can_be_asked(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert set(asked_code(tmp_path)) <= {"B"}
    assert len(code_hash(tmp_path)) == 64
