"""Findings about weights of models with experts, from the folder's config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned import spec_of

from partool.catalog.models import resolve_model
from partool.planner.resolve import resolve
from partool.planner.rules.weights import check_weights
from partool.spec.launch import LaunchSpec
from partool.spec.spec import Spec

DENSE = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
MIXTRAL = DENSE | {"model_type": "mixtral"}
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 96}
NARROW, MORE = ({"layers": {"1": shape}} for shape in ({"ffn_hidden": 64}, {"experts": 16, "top_k": 4}))
"""Other experts in the second layer."""


def write_weights(folder: Path, name: str = "model.safetensors") -> None:
    """Write a file of no tensors."""
    (folder / name).write_bytes((2).to_bytes(8, "little") + b"{}")


def findings(config: dict[str, Any], folder: Path, *, upcycle: bool, **model: Any) -> list[tuple[str, str, str]]:
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder)
    weights = {"source": "hf", "path": str(folder), "upcycle": upcycle}
    spec = Spec.model_validate(
        {"model": {"config": str(folder), "weights": weights, **model}, "data": "x", "hardware": {"accelerator": "cpu"}}
    )
    resolved = resolve_model(spec.model, folder).config
    assert resolved is not None
    found = check_weights(spec, LaunchSpec(), resolved, folder)
    return [(one.code, ".".join(map(str, one.path)), f"{one.message} {one.help}") for one in found]


@pytest.mark.parametrize(
    ("config", "model", "upcycle", "code", "at", "says"),
    [
        (DENSE, {}, True, "PT229", "model.weights.upcycle", "no experts"),
        (DENSE, {"moe": MOE | {"ffn_hidden": 64}}, True, "PT229", "model.moe.ffn_hidden", "use 96"),
        (DENSE, {"moe": MOE | NARROW}, True, "PT229", "model.moe.layers.1.ffn_hidden", "use 96"),
        (DENSE, {"moe": MOE | MORE}, True, "", "", ""),
        (MIXTRAL, {"moe": MOE | MORE}, False, "PT621", "model.weights.path", "moe.layers"),
        (DENSE, {"moe": MOE | {"shared_experts": 1}}, True, "PT229", "model.moe.shared_experts", "use 0"),
        (DENSE, {"moe": MOE | {"normalise": False}}, True, "PT229", "model.moe.normalise", "use true"),
        (DENSE, {"moe": MOE | {"scaling_factor": 2.0}}, True, "PT229", "model.moe.scaling_factor", "use 1.0"),
        (DENSE | {"mlp_bias": True}, {"moe": MOE}, True, "PT229", "model.ffn_bias", "no biases"),
        (MIXTRAL, {}, True, "PT229", "model.weights.path", "no dense networks"),
        (DENSE, {"moe": MOE}, False, "PT621", "model.weights.path", "upcycle: true"),
        (DENSE, {"moe": MOE, "layers": 3}, True, "PT621", "model.weights.path", "layers is 3"),
        (MIXTRAL, {"moe": MOE | {"experts": 4}}, False, "PT621", "model.weights.path", "moe.experts is 4"),
        (MIXTRAL, {"moe": MOE | {"bias_rate": 0.1}}, False, "PT621", "model.weights.path", "selection biases"),
        (DENSE, {"vocab": 250}, False, "PT621", "model.weights.path", "vocab is 250"),
        (DENSE, {"vocab": 260}, False, "PT631", "model.vocab", "4 tokens more"),
        (DENSE, {"vocab": 260, "moe": MOE}, True, "PT621", "model.weights.path", "vocab is 260"),
        (DENSE, {"multi_token": 1}, False, "PT638", "model.multi_token", "have 0 modules"),
        (DENSE, {"moe": MOE}, True, "", "", ""),
        (MIXTRAL, {}, False, "", "", ""),
    ],
)  # fmt: skip
def test_weights_of_experts(
    config: dict[str, Any], model: dict[str, Any], upcycle: bool, code: str, at: str, says: str, tmp_path: Path
) -> None:
    found = findings(config, tmp_path, upcycle=upcycle, **model)
    assert [one[:2] for one in found] == ([(code, at)] if code else [])
    assert says in (found[0][2] if found else "")


@pytest.mark.parametrize(
    ("tied", "train", "severity", "help"),
    [
        (False, [], "warning", "train: [embed, head]"),
        (False, ["embed"], "warning", "train: [embed, head]"),
        (False, ["embed", "head"], "note", ""),
        (False, ["*.weight"], "note", ""),
        (True, ["norms"], "warning", "train: [embed]"),
        (True, ["embed"], "note", ""),
    ],
)
def test_an_adapter_should_train_new_tokens(
    tmp_path: Path, tied: bool, train: list[str], severity: str, help: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"tie_word_embeddings": tied}))
    write_weights(tmp_path)
    model = {"config": str(tmp_path), "vocab": 260, "weights": {"source": "hf", "path": str(tmp_path)}}
    spec = Spec.model_validate(
        {"model": model, "adapter": {"train": train}, "data": "x", "hardware": {"accelerator": "cpu"}}
    )
    resolved = resolve_model(spec.model, tmp_path).config
    assert resolved is not None
    (finding,) = check_weights(spec, LaunchSpec(), resolved, tmp_path)
    assert (finding.code, finding.severity) == ("PT631", severity)
    assert help in (finding.help or "")


SPEC = """model: {{layers: 2, hidden: 64, heads: 4, vocab: 256, weights: {{source: {}, path: {}}}}}
hardware: {{accelerator: {}, per_node: 1}}
data: python-stdlib
"""


@pytest.mark.parametrize(
    ("source", "files", "said"),
    [
        ("hf", {}, "holds neither model.safetensors nor"),
        ("hf", {"pytorch_model.bin": b"0"}, "holds neither model.safetensors nor"),
        ("hf", {"model.safetensors": b""}, "its 0 bytes are no safetensors file"),
        ("hf", {"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, "pointer of Git LFS"),
        ("hf", {"model.safetensors.index.json": b"{}"}, "no weight_map"),
        ("hf", {"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'}, "gone.safetensors"),
        ("checkpoint", {"logs": b""}, "holds no checkpoint"),
    ],
)
def test_folders_without_weights_are_refused(tmp_path: Path, source: str, files: dict[str, bytes], said: str) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for accelerator in ("cpu", "h100-sxm"):  # the folder is here, so what it holds is known
        (one,) = resolve(spec_of(SPEC.format(source, "w", accelerator)), tmp_path).diagnostics
        assert (one.code, one.severity, one.path) == ("PT620", "error", ("model", "weights", "path"))
        assert said in one.message


def test_folders_with_weights_are_none_of_it(tmp_path: Path) -> None:
    for name in ("run/checkpoints/step-00000010", "step-00000010"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "single").mkdir()
    write_weights(tmp_path / "single")
    for source, path in (("checkpoint", "run"), ("checkpoint", "step-00000010"), ("hf", "single")):
        assert resolve(spec_of(SPEC.format(source, path, "cpu")), tmp_path).diagnostics == []
