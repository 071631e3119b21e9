"""Modules of further tokens in folders, there and back, and the logits of transformers' DeepSeek-V3 beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from partool.catalog.huggingface import convert
from partool.layout.parameters import parameters
from partool.spec.model import Mla, ModelConfig, Moe, MultiToken, Weights
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import write_folder
from partool_runtime.model import Decoder
from partool_runtime.weights import build, fill, materialise, post_load

TOKENS_BS = torch.arange(2 * 19).reshape(2, 19) * 7 % 43
MLA = Mla(q_rank=14, kv_rank=10, nope_head_dim=6, rope_head_dim=4, v_head_dim=7)
MOE = Moe(
    experts=6, top_k=2, ffn_hidden=11, shared_experts=1, first_dense_layers=1, scores="sigmoid", bias_rate=0.001,
    scaling_factor=2.5, groups=2, top_groups=1, aux_scope="sequence",
)  # fmt: skip
DEEPSEEK = ModelConfig(
    layers=2, hidden=24, ffn_hidden=44, heads=3, kv_heads=3, head_dim=10, vocab=43, max_position=64, mla=MLA, moe=MOE,
    multi_token=MultiToken(depth=2),
)  # fmt: skip
COPIES = {
    "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight": "lm_head.weight",
    "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.3.shared_head.head.weight": "lm_head.weight",
}


def randomised(config: ModelConfig) -> Decoder:
    model, generator = Decoder(config).double(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def read(config: ModelConfig, path: Path) -> tuple[Decoder, tuple[str, ...]]:
    model = build(config)
    materialise(model, "cpu", torch.float64)
    notes = fill(model, Weights(source="hf", path=str(path)), seed=0)
    post_load(model)
    return model, notes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Path]:
    ours, path = randomised(DEEPSEEK), tmp_path_factory.mktemp("folder")
    assert write_folder(ours.state_dict(), DEEPSEEK, path).model_type == "deepseek_v3"
    return ours, path


def test_a_folder_has_the_names_of_deepseek_and_the_same_bits_come_back(folder: tuple[Decoder, Path]) -> None:
    ours, path = folder
    stored = load_file(path / "model.safetensors")
    names = {name for name in stored if name.startswith("model.layers.3.") and ".experts." not in name}
    of_module = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"}
    assert {f"model.layers.3.{name}.weight" for name in of_module} <= names
    assert {f"model.layers.3.self_attn.{name}.weight" for name in ("q_a_proj", "kv_b_proj", "o_proj")} <= names
    assert stored["model.layers.2.eh_proj.weight"].shape == (24, 48)
    assert all(torch.equal(stored[copy], stored[original]) for copy, original in COPIES.items())
    back, notes = read(DEEPSEEK, path)
    assert notes == ()
    assert [name for name, _ in back.named_parameters()] == [info.name for info in parameters(DEEPSEEK)]
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))


def test_the_modules_are_read_where_they_are_asked_for(folder: tuple[Decoder, Path]) -> None:
    ours, path = folder
    settings = json.loads((path / "config.json").read_text())
    assert settings["num_nextn_predict_layers"] == 2
    found = {depth: [each.code for each in convert(settings, predictions=depth)[1]] for depth in (0, 1, 2)}
    assert found == {0: ["PT255"], 1: ["PT255"], 2: []}
    fields = convert(settings)[0]
    assert fields is not None
    assert "multi_token" not in fields
    plain, notes = read(DEEPSEEK.model_copy(update={"multi_token": None}), path)
    assert len(notes) == 1
    assert "model.layers.3.eh_proj.weight" in notes[0]
    one, notes = read(DEEPSEEK.model_copy(update={"multi_token": MultiToken(depth=1)}), path)
    assert "model.layers.2." not in notes[0]
    assert torch.equal(one.state_dict()["predictions.0.projection.weight"], ours.state_dict()[
        "predictions.0.projection.weight"
    ])  # fmt: skip
    with torch.no_grad():
        assert torch.equal(plain.logits(TOKENS_BS), ours.logits(TOKENS_BS))
    with pytest.raises(ConfigurationError, match=r"missing layers\.4\."):
        read(DEEPSEEK.model_copy(update={"multi_token": MultiToken(depth=3)}), path)


def test_copies_that_differ_are_an_error(folder: tuple[Decoder, Path], tmp_path: Path) -> None:
    _, path = folder
    stored = load_file(path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    for copy in COPIES:
        changed = stored[copy].clone()
        changed[-1, -1] += 1e-9
        save_file(stored | {copy: changed}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigurationError, match=copy) as caught:
            read(DEEPSEEK, tmp_path)
        assert caught.value.code == "PT619"
    without = {name: tensor for name, tensor in stored.items() if name not in COPIES}
    save_file(without, tmp_path / "model.safetensors")
    assert read(DEEPSEEK, tmp_path)[1] == ()


def test_main_logits_are_those_of_transformers(folder: tuple[Decoder, Path]) -> None:
    transformers: Any = pytest.importorskip("transformers")
    ours, path = folder
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in report["unexpected_keys"])
    if hasattr(theirs, "set_experts_implementation"):
        theirs.set_experts_implementation("eager")  # grouped products take no float64
    with torch.no_grad():
        mine, reference = ours.logits(TOKENS_BS), theirs.eval()(TOKENS_BS).logits
    assert reference.abs().max() > 0.5
    # transformers computes rotation angles and routers in float32 even in a float64 model
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


def test_other_families_leave_the_modules_out(tmp_path: Path) -> None:
    llama = ModelConfig(
        layers=2, hidden=24, ffn_hidden=44, heads=3, kv_heads=3, head_dim=8, vocab=43, multi_token=MultiToken()
    )
    ours = randomised(llama)
    assert not write_folder(ours.state_dict(), llama, tmp_path).predicts
    back, notes = read(llama.model_copy(update={"multi_token": None}), tmp_path)
    assert notes == ()
    with torch.no_grad():
        assert torch.equal(back.logits(TOKENS_BS), ours.logits(TOKENS_BS))
