"""Import and export of latent attention and YaRN, against transformers' own models and functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from partool.catalog.huggingface import convert
from partool.spec.model import Mla, ModelConfig, RopeScaling, Weights
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import open_folder, write_folder
from partool_runtime.hf.stored import dequantized, row_order
from partool_runtime.model import Decoder
from partool_runtime.model.rope import frequencies, score_scale, table_scale
from partool_runtime.weights import build, fill, materialise, post_load

transformers = pytest.importorskip("transformers")

TOKENS_BS = torch.arange(2 * 19).reshape(2, 19) * 7 % 43
SIZES = {"layers": 2, "hidden": 24, "ffn_hidden": 44, "heads": 3, "kv_heads": 3, "vocab": 43, "max_position": 64}
MLA = Mla(q_rank=14, kv_rank=10, nope_head_dim=6, rope_head_dim=4, v_head_dim=7)
LITE = MLA.model_copy(update={"q_rank": None})
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position=16, beta_fast=8.0, mscale=0.7, mscale_all_dim=1.1)
HF_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "mscale": 0.7,
    "mscale_all_dim": 1.1,
}  # fmt: skip
COMMON = {
    "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 44, "num_attention_heads": 3,
    "num_key_value_heads": 3, "vocab_size": 43, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "first_k_dense_replace": 2, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


def config(mla: Mla = MLA, **more: Any) -> ModelConfig:
    return ModelConfig(**SIZES | {"head_dim": mla.qk_head_dim, "mla": mla, "norm_eps": 1e-5} | more)


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0} | more}


CASES = {
    "v3": (config(rope_theta=300.0), "deepseek_v3", rope()),
    "v3-yarn-biases": (
        config(rope_theta=300.0, rope_scaling=YARN, qkv_bias=True, out_bias=True),
        "deepseek_v3",
        rope(**HF_YARN) | {"attention_bias": True},
    ),
    "v3-halves": (config(rope_theta=300.0), "deepseek_v3", rope() | {"rope_interleave": False}),
    "v2": (config(rope_theta=300.0), "deepseek_v2", rope()),
    "v2-lite-yarn": (
        config(LITE, rope_theta=300.0, rope_scaling=YARN), "deepseek_v2", rope(**HF_YARN) | {"q_lora_rank": None}
    ),
}  # fmt: skip


def theirs_of(case: str) -> tuple[ModelConfig, Any]:
    """Return a case's configuration, and transformers' model with random weights in float64."""
    ours, model_type, more = CASES[case]
    settings = transformers.AutoConfig.for_model(model_type, **COMMON | more)
    return ours, randomised(transformers.AutoModelForCausalLM.from_config(settings).double().eval())


def randomised(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def native(ours: ModelConfig, path: Path) -> Decoder:
    model = build(ours)
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(source="hf", path=str(path)), seed=0)
    post_load(model)
    return model


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # transformers computes rotation angles in float32 even in a float64 model, and in DeepSeek-V2 also the rotation
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_their_folder(case: str, tmp_path: Path) -> None:
    ours, theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path)
    fields, findings = convert(json.loads((tmp_path / "config.json").read_text()))
    assert not [finding for finding in findings if finding.severity == "error"]
    assert ModelConfig(**fields) == ours.model_copy(update={"init_std": 0.02})
    with torch.no_grad():
        assert_close(native(ours, tmp_path).logits(TOKENS_BS), theirs(TOKENS_BS).logits)


@pytest.mark.parametrize("case", ["v3-yarn-biases", "v2-lite-yarn"])
def test_logits_of_our_folder(case: str, tmp_path: Path) -> None:
    settings = CASES[case][0]
    ours = randomised(Decoder(settings).double())
    assert write_folder(ours.state_dict(), settings, tmp_path).model_type == "deepseek_v3"
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        assert_close(ours.logits(TOKENS_BS), theirs.eval()(TOKENS_BS).logits)
    back = native(settings, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))


def test_blocks_of_turned_rows_are_read_alone(tmp_path: Path) -> None:
    settings = CASES["v3-yarn-biases"][0]
    ours = randomised(Decoder(settings))
    write_folder(ours.state_dict(), settings, tmp_path)
    with open_folder(tmp_path, settings) as source:
        for name, parameter in ours.named_parameters():
            for first, stop in ((0, 0), (3, 9), (8, 12)):
                columns = tuple(slice(size // 3, size) for size in parameter.shape[1:])
                sizes = (stop - first, *(part.stop - part.start for part in columns))
                offsets = (first, *(part.start for part in columns))
                block = source.block(name, tuple(parameter.shape), offsets, sizes)
                assert torch.equal(block, parameter[slice(first, min(stop, len(parameter))), *columns]), name


def test_order_of_rows() -> None:
    """Pairs (0, 1), (2, 3) of a rotated part become (0, 2), (1, 3); other rows stay."""
    mla = Mla(kv_rank=3, nope_head_dim=1, rope_head_dim=4, v_head_dim=2)
    assert row_order(mla, "heads", 10).tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]
    assert row_order(mla, "shared", 7).tolist() == [0, 1, 2, 3, 5, 4, 6]


@pytest.mark.parametrize("fault", ["", "scale"])
def test_weights_in_8_bits_and_predicting_layers(fault: str, tmp_path: Path) -> None:
    """Matrices of attention and networks in blocks of 8 bits; tensors of a layer that predicts a second token."""
    ours, theirs = theirs_of("v3")
    theirs.float().save_pretrained(tmp_path)
    tensors, block, plain = load_file(tmp_path / "model.safetensors"), (5, 9), {}
    for name in [name for name in tensors if name.endswith(("proj.weight", "mqa.weight"))]:
        weight = tensors[name]
        shape = [-(-size // width) for size, width in zip(weight.shape, block, strict=True)]
        scales = torch.rand(shape, generator=torch.Generator().manual_seed(len(plain))) + 0.5
        tensors[name] = (weight * 4).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales
        whole = scales.repeat_interleave(block[0], 0)[: len(weight)].repeat_interleave(block[1], 1)
        plain[name] = tensors[name].double() * whole[:, : weight.shape[1]].double()
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["num_nextn_predict_layers"] = 1
    quantized = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps(settings | ({} if fault else {"quantization_config": quantized})))
    model = build(ours)
    materialise(model, "cpu", torch.float64)
    if fault:
        with pytest.raises(ConfigurationError, match="does not say in which blocks"):
            fill(model, Weights(source="hf", path=str(tmp_path)), seed=0)
        return
    notes = fill(model, Weights(source="hf", path=str(tmp_path)), seed=0)
    assert len(notes) == 1
    assert "model.layers.2.eh_proj.weight" in notes[0]
    found = convert(settings | {"quantization_config": quantized})[1]
    assert [finding.code for finding in found if "model.layers 2" in finding.message] == ["PT255"]
    theirs.double().load_state_dict(plain, strict=False)
    with torch.no_grad():
        assert_close(model.logits(TOKENS_BS), theirs(TOKENS_BS).logits)


def test_blocks_of_scales() -> None:
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = dequantized(torch.ones(3, 2), scales, (1, 2), (2, 3))
    assert found.tolist() == [[1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    "more", [{}, {"mscale": 0.7, "mscale_all_dim": 0.4}, {"mscale_all_dim": 0.9}, {"beta_slow": 7.9}]
)
def test_yarn_is_that_of_transformers(more: dict[str, float]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    numbers = {"factor": 8.0, "beta_fast": 8.0} | more
    scaling = RopeScaling(kind="yarn", original_max_position=256, **numbers)
    ours = ModelConfig(**SIZES | {"head_dim": 34, "rope_theta": 5000.0, "rope_scaling": scaling})
    given = {"rope_type": "yarn", "rope_theta": 5000.0, "original_max_position_embeddings": 256, **numbers}
    theirs = transformers.LlamaConfig(
        hidden_size=24, num_attention_heads=3, head_dim=34, max_position_embeddings=2048, rope_parameters=given
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    torch.testing.assert_close(frequencies(ours).float(), expected, rtol=2e-6, atol=0.0)
    assert table_scale(scaling) == pytest.approx(factor)
    assert factor != 1.0
    assert score_scale(ours) is None
