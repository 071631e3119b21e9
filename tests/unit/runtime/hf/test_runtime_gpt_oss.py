"""GPT-OSS in partool's own decoder, against transformers' model in float64: there and back, and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from partool.catalog.huggingface import convert
from partool.spec.experts import Moe
from partool.spec.model import ModelConfig, RopeScaling, Weights
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import open_folder, write_folder
from partool_runtime.hf.experts import plain_experts
from partool_runtime.hf.numerics import KeepWide
from partool_runtime.model import Decoder
from partool_runtime.model.rope import frequencies
from partool_runtime.weights import build, fill, materialise, post_load

transformers = pytest.importorskip("transformers")

TOKENS_BS = torch.arange(2 * 13).reshape(2, 13) * 7 % 43
OURS = ModelConfig(
    layers=3, hidden=20, ffn_hidden=9, heads=6, kv_heads=3, head_dim=4, vocab=43, max_position=64, norm_eps=1e-5,
    activation="swiglu_clamped", swiglu_limit=0.6, swiglu_alpha=1.3, rope_theta=150.0, qkv_bias=True, out_bias=True,
    rope_scaling=RopeScaling(
        kind="yarn", factor=4.0, beta_fast=3.0, beta_slow=0.4, truncate=False, original_max_position=16
    ),
    window=5, layer_types=("sliding", "full", "sliding"), sinks=True,
    moe=Moe(experts=5, top_k=2, ffn_hidden=9, bias=True, aux_loss=0.02 * 2 / 3),
)  # fmt: skip
"""Limits that many of the random gates exceed, and a ramp of frequencies that ends within pairs."""


def theirs_of(config: ModelConfig) -> Any:
    """Return transformers' model of the same sizes with random weights, in float64."""
    assert config.moe is not None
    assert config.rope_scaling is not None
    settings = transformers.GptOssConfig(
        num_hidden_layers=config.layers, hidden_size=config.hidden, intermediate_size=config.moe.ffn_hidden,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
        vocab_size=config.vocab, max_position_embeddings=config.max_position, sliding_window=config.window,
        num_local_experts=config.moe.experts, num_experts_per_tok=config.moe.top_k, swiglu_limit=config.swiglu_limit,
        swiglu_alpha=config.swiglu_alpha, output_router_logits=True, router_aux_loss_coef=0.02, bos_token_id=None,
        eos_token_id=None, attn_implementation="eager",
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 3.0, "beta_slow": 0.4, "truncate": False,
            "original_max_position_embeddings": 16, "rope_theta": 150.0,
        },
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(settings).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 + ("norm" in name))
    plain_experts(model, wide=True)
    return model


def logits_of(theirs: Any) -> torch.Tensor:
    """Return logits with frequencies and all else in float64."""
    for module in theirs.modules():
        if hasattr(module, "inv_freq"):
            assert torch.allclose(module.inv_freq.float(), frequencies(OURS).float(), rtol=1e-5)
            module.inv_freq = frequencies(OURS)
    with KeepWide():
        logits: torch.Tensor = theirs.eval()(TOKENS_BS).logits
    return logits


def native(path: Path) -> Decoder:
    model = build(OURS)
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(source="hf", path=str(path)), seed=0)
    post_load(model)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    theirs = theirs_of(OURS)
    path = tmp_path_factory.mktemp("gpt_oss")
    theirs.save_pretrained(path)
    return path, theirs


def test_the_configuration_there_and_back(folder: tuple[Path, Any], tmp_path: Path) -> None:
    written = json.loads((folder[0] / "config.json").read_text())
    fields, findings = convert(written)
    assert not findings
    assert ModelConfig(**(fields or {})) == OURS
    model = native(folder[0])
    write_folder({name: p.detach() for name, p in model.named_parameters()}, OURS, tmp_path)
    returned, findings = convert(json.loads((tmp_path / "config.json").read_text()))
    assert not findings
    assert ModelConfig(**(returned or {})) == OURS
    before, after = (load_file(path / "model.safetensors") for path in (folder[0], tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_logits_and_gradients_are_those_of_transformers(folder: tuple[Path, Any], tmp_path: Path) -> None:
    path, theirs = folder
    ours = native(path)
    expected, logits = logits_of(theirs), ours.logits(TOKENS_BS)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-10)
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    of_theirs, of_parameters = (
        dict(zip(names, torch.autograd.grad((output * probe).sum(), list(names.values())), strict=True))
        for names, output in ((dict(theirs.named_parameters()), expected), (dict(ours.named_parameters()), logits))
    )
    write_folder(of_parameters, OURS, tmp_path)
    of_ours = load_file(tmp_path / "model.safetensors")
    assert of_theirs.keys() == of_ours.keys()
    for name, grad in of_theirs.items():
        assert grad.abs().max() > 0, name
        assert torch.allclose(of_ours[name], grad, rtol=1e-9, atol=1e-11), name


def test_blocks_of_experts_are_parts_of_the_whole(folder: tuple[Path, Any]) -> None:
    ours = dict(native(folder[0]).named_parameters())
    with open_folder(folder[0], OURS) as files:
        for leaf in ("gate", "up", "down"):
            for ending in ("weight", "bias"):
                name = f"layers.1.moe.experts.{leaf}.{ending}"
                whole = ours[name]
                offsets, sizes = (7, 2)[: whole.dim()], (17, 5)[: whole.dim()]
                cut = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
                assert torch.equal(files.block(name, tuple(whole.shape), offsets, sizes), whole[cut])


def test_weights_in_mxfp4_are_refused(folder: tuple[Path, Any], tmp_path: Path) -> None:
    config = json.loads((folder[0] / "config.json").read_text())
    _, findings = convert(config | {"quantization_config": {"quant_method": "mxfp4"}})
    assert [finding.code for finding in findings] == ["PT253"]
    assert "Mxfp4Config(dequantize=True)" in findings[0].help
    tensors = load_file(folder[0] / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_blocks"] = tensors.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"PT609.*mxfp4") as raised:
        native(tmp_path)
    assert "dequantize=True" in str(raised.value)
