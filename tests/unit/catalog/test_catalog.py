"""Models, Hugging Face configurations and hardware of the catalog."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _active import count_active

from partool.catalog.hardware import resolve_hardware
from partool.catalog.huggingface import convert, read_config, read_generation
from partool.catalog.lookup import table
from partool.catalog.models import resolve_model
from partool.layout.parameters import count, parameters
from partool.spec.hardware import HardwareSpec
from partool.spec.model import Attention, LayerPattern, ModelConfig, ModelSpec

HERE = Path(__file__).parents[1]
PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize("name", table("models"))
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    resolved = resolve_model(ModelSpec(preset=name), HERE)
    assert resolved.diagnostics == ()
    assert resolved.config is not None
    assert count(parameters(resolved.config)) == table("models")[name]["parameters"]
    assert PUBLISHED.get(name, table("models")[name]["parameters"]) == table("models")[name]["parameters"]


def test_active_parameters_of_experts() -> None:
    config = resolve_model(ModelSpec(preset="mixtral-8x7b"), HERE).config
    assert config is not None
    assert count_active(config) == pytest.approx(12.88e9, rel=0.01)
    dense = resolve_model(ModelSpec(preset="gpt2"), HERE).config
    assert dense is not None
    assert count_active(dense) == count(parameters(dense))


def test_every_entry_names_its_source() -> None:
    for name in ("accelerators", "fabrics", "models"):
        for key, entry in table(name).items():  # type: ignore[arg-type]
            assert entry["source"], key
            assert entry["as_of"], key


def test_llama_with_scaled_rope() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    fields, found = convert({**LLAMA, "rope_parameters": rope, "tie_word_embeddings": True})
    assert found == []
    assert fields is not None
    assert (fields["rope_theta"], fields["rope_scaling"]["factor"], fields["tied_embeddings"]) == (5e5, 8.0, True)
    assert (fields["kv_heads"], fields["norm_eps"]) == (2, 1e-6)


def test_windows_by_family() -> None:
    mistral, _ = convert({**LLAMA, "model_type": "mistral", "sliding_window": 32})
    assert mistral is not None
    assert (mistral["window"], mistral["layer_types"]) == (32, ("sliding", "sliding"))
    off, _ = convert({**LLAMA, "model_type": "mistral", "sliding_window": None})
    assert off is not None
    assert "window" not in off
    qwen2, _ = convert({**LLAMA, "model_type": "qwen2", "sliding_window": 32, "max_window_layers": 1})
    assert qwen2 is not None
    assert "window" not in qwen2
    assert qwen2["qkv_bias"]
    some = {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 1, "use_sliding_window": True}
    partly, _ = convert({**LLAMA, **some})
    assert partly is not None
    assert partly["layer_types"] == ("full", "sliding")


QWEN3_MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 4}
DEEPSEEK_V2 = {"model_type": "deepseek_v2", "num_experts_per_tok": 6}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "first_k_dense_replace": 1}


def test_other_families() -> None:
    gpt2, found = convert({"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "n_ctx": 9})
    assert found == []
    assert gpt2 is not None
    assert (gpt2["ffn_hidden"], gpt2["activation"], gpt2["position"], gpt2["tied_embeddings"]) == (
        128, "gelu_tanh", "learned", True,
    )  # fmt: skip
    qwen3, _ = convert({**LLAMA, "model_type": "qwen3"})
    assert qwen3 is not None
    assert qwen3["qk_norm"]
    assert qwen3["head_dim"] == 128
    mixtral, _ = convert({**LLAMA, "model_type": "mixtral"})
    assert mixtral is not None
    assert mixtral["moe"] == {"experts": 8, "top_k": 2, "ffn_hidden": 96, "normalise": True, "aux_loss": 0.0}
    deepseek, _ = convert({**LLAMA, "model_type": "deepseek_v3"})
    assert deepseek is not None
    assert deepseek["mla"]["kv_rank"] == 512
    assert deepseek["head_dim"] == 192


def test_experts_of_other_families() -> None:
    """What transformers' configuration classes say where a file is silent, and which layers have experts."""

    def moe_of(**config: Any) -> Any:
        fields, found = convert({**LLAMA, **config})
        assert fields is not None
        assert [finding for finding in found if finding.severity == "error"] == []
        return fields.get("moe")

    assert moe_of(model_type="mixtral", router_aux_loss_coef=0.02)["aux_loss"] == 0.0
    assert moe_of(model_type="mixtral", output_router_logits=True, router_aux_loss_coef=0.02)["aux_loss"] == 0.02
    qwen3 = {**QWEN3_MOE, "output_router_logits": True}
    assert moe_of(**qwen3)["aux_loss"] == 0.002
    assert moe_of(**qwen3, mlp_only_layers=[0, 2])["aux_loss"] == 0.004
    assert moe_of(**QWEN3_MOE)["normalise"] is False
    assert moe_of(**QWEN3_MOE, norm_topk_prob=True)["normalise"] is True
    sparse = moe_of(**QWEN3_MOE, mlp_only_layers=[0, 3], decoder_sparse_step=2)
    assert (sparse["first_dense_layers"], sparse["every"]) == (1, 3)
    assert moe_of(**QWEN3_MOE, mlp_only_layers=[0, 1, 2, 3]) is None
    v3 = moe_of(**DEEPSEEK_V3)
    assert v3 == {
        "experts": 256, "top_k": 8, "ffn_hidden": 2048, "shared_experts": 1, "first_dense_layers": 1,
        "scaling_factor": 2.5, "aux_loss": 0.0, "aux_scope": "sequence", "scores": "sigmoid", "normalise": True,
        "groups": 8, "top_groups": 4, "group_score": "top2", "bias_rate": 0.001,
    }  # fmt: skip
    v2 = moe_of(**DEEPSEEK_V2, aux_loss_alpha=0.003, seq_aux=False, n_group=4, topk_group=2)
    assert (v2["aux_loss"], v2["aux_scope"], v2["normalise"], "groups" in v2) == (0.003, "micro_batch", False, False)


def test_the_preset_of_gpt_oss_is_its_configuration() -> None:
    """The published keys, without the quantization of the published weights."""
    published = {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880, "num_attention_heads": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    }  # fmt: skip
    fields, found = convert(published)
    assert not found
    preset = resolve_model(ModelSpec(preset="gpt-oss-20b"), HERE).config
    assert preset is not None
    read = ModelConfig(**(fields or {}))
    assert read.model_dump(exclude_defaults=True) == preset.model_dump(exclude_defaults=True)
    bare = {key: published[key] for key in ("model_type", "num_hidden_layers", "num_local_experts")}
    sizes = {key: published[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")}
    assert ModelConfig(**(convert(bare | sizes | {"intermediate_size": 2880})[0] or {})) == read


def test_fields_of_gpt_oss_are_changed_one_by_one() -> None:
    plain = ModelSpec(preset="gpt-oss-20b", activation="swiglu", attention=Attention(sinks=False))
    config = resolve_model(plain, HERE).config
    assert config is not None
    assert (config.activation, config.sinks, config.window) == ("swiglu", False, 128)
    assert "swiglu_limit" not in config.model_dump()
    unread = resolve_model(ModelSpec(preset="llama3-8b", swiglu_limit=3.0), HERE)
    assert [finding.code for finding in unread.diagnostics] == ["PT402"]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"model_type": "mamba"}, "PT252", "mamba"),
        ({"hidden_act": "relu"}, "PT253", "relu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "PT253", "dynamic"),
        ({"rope_scaling": YARN | {"attention_factor": 1.2}}, "PT253", "attention_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "PT253", "partial_rotary"),
        ({"quantization_config": {"bits": 4}}, "PT253", "quantization_config"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "PT253", "mxfp4"),
        ({"num_nextn_predict_layers": 1}, "PT253", "multi-token"),
        ({"hidden_size": "64"}, "PT253", "hidden_size"),
        ({"num_attention_heads": 0}, "PT253", "num_attention_heads"),
        ({"attention_dropout": 0.1}, "PT254", "attention_dropout"),
        ({"made_up": 1}, "PT254", "made_up"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "PT254", "router_jitter_noise"),
        (QWEN3_MOE | {"mlp_only_layers": [2]}, "PT253", "mlp_only_layers"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "PT253", "topk_method"),
        (DEEPSEEK_V2 | {"scoring_func": "sigmoid"}, "PT253", "scoring_func"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "PT253", "norm_topk_prob"),
        (DEEPSEEK_V2 | {"moe_layer_freq": 2}, "PT253", "moe_layer_freq"),
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "PT253", "topk_method"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "PT253", "scoring_func"),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["linear_attention"] * 2},
            "PT253", "linear_attention",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_represented_is_said(change: dict[str, Any], code: str, said: str) -> None:
    _, found = convert({**LLAMA, **change})
    assert any(finding.code == code and said in finding.message for finding in found)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "llama", "rope_scaling": "no"}', "\x00"])
def test_malformed_files_are_findings(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    fields, _, found = read_config(tmp_path)
    assert fields is None
    assert [finding.code for finding in found] == ["PT251"]


def test_spec_fields_override_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    resolved = resolve_model(ModelSpec(config="config.json", layers=3, vocab=50), tmp_path)
    assert resolved.config is not None
    assert (resolved.config.layers, resolved.config.vocab, resolved.config.hidden) == (3, 50, 64)
    assert "layers" in resolved.source
    assert len(resolved.inputs["model.config"]) == 64


def test_fields_that_follow_from_others() -> None:
    config = resolve_model(ModelSpec(layers=4, hidden=192, heads=6), HERE, vocab=256).config
    assert config is not None
    assert (config.kv_heads, config.head_dim, config.ffn_hidden, config.vocab) == (6, 32, 512, 256)
    plain = resolve_model(ModelSpec(layers=4, hidden=192, heads=6, activation="gelu"), HERE, vocab=256).config
    assert plain is not None
    assert plain.ffn_hidden == 768
    pattern = Attention(window=8, layer_types=LayerPattern(pattern=["sliding", "full"]))
    mixed = resolve_model(ModelSpec(layers=3, hidden=8, heads=2, attention=pattern), HERE, vocab=9).config
    assert mixed is not None
    assert mixed.layer_types == ("sliding", "full", "sliding")


def test_overrides_that_break_a_preset_are_findings() -> None:
    for changes, code in (
        ({"kv_heads": 3}, "PT204"),
        ({"head_dim": 63}, "PT206"),
        ({"attention": Attention(layer_types=["full"])}, "PT209"),
    ):
        resolved = resolve_model(ModelSpec(preset="llama3-8b", **changes), HERE)  # type: ignore[arg-type]
        assert resolved.config is None
        assert [finding.code for finding in resolved.diagnostics] == [code]


def test_catalog_hardware_and_own_figures() -> None:
    h100 = resolve_hardware(HardwareSpec(accelerator="h100-sxm", nodes=2), "bf16").devices
    assert h100 is not None
    assert (h100.nodes, h100.per_node, h100.backend, h100.peak_flops) == (2, 8, "cuda", 989e12)
    assert h100.fabric_bytes_per_s == 50e9
    changed = HardwareSpec(accelerator="h100-sxm", memory_gib=94.0, peak_tflops=494.5, fabric="ethernet-100g")
    own = resolve_hardware(changed, "bf16").devices
    assert own is not None
    assert own.memory_bytes == 94 * 2**30
    assert own.achievable_flops == pytest.approx(h100.achievable_flops / 2)
    assert own.fabric_bytes_per_s == pytest.approx(12.5e9 / 8)
    free = HardwareSpec(accelerator="x1", memory_gib=10.0, peak_tflops=100.0, memory_gb_per_s=500.0)
    assert resolve_hardware(free, "bf16").devices is not None


def test_hardware_that_is_not_there() -> None:
    for changes, precision, code in (
        ({"accelerator": "h100-xsm"}, "bf16", "PT260"),
        ({"accelerator": "h100-sxm", "fabric": "ib-ndx"}, "bf16", "PT261"),
        ({"accelerator": "v100-32"}, "bf16", "PT263"),
    ):
        resolved = resolve_hardware(HardwareSpec(**changes), precision)  # type: ignore[arg-type]
        assert resolved.devices is None
        assert [finding.code for finding in resolved.diagnostics] == [code]
        assert resolved.diagnostics[0].help


def test_limits_and_the_cpu() -> None:
    some = resolve_hardware(HardwareSpec(accelerator="h100-sxm", nodes=4), "bf16", 20).devices
    assert some is not None
    assert (some.nodes, some.per_node) == (2, 8)
    few = resolve_hardware(HardwareSpec(accelerator="h100-sxm", nodes=4), "bf16", 3).devices
    assert few is not None
    assert (few.nodes, few.per_node) == (1, 3)
    cpu = resolve_hardware(HardwareSpec(accelerator="cpu", per_node=3, memory_gib=30.0), "fp32").devices
    assert cpu is not None
    assert (cpu.backend, cpu.memory_bytes, cpu.peak_flops) == ("cpu", 10 * 2**30, None)
    assert cpu.threads_per_rank >= 1


def write_generation(folder: Path, config: dict[str, Any], settings: str | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if settings is not None:
        (folder / "generation_config.json").write_text(settings)
    return folder


def test_special_tokens_and_settings_are_kept_for_exports(tmp_path: Path) -> None:
    settings = {"eos_token_id": [7, 8], "do_sample": True}
    folder = write_generation(tmp_path, {"eos_token_id": 7, "pad_token_id": None}, json.dumps(settings))
    for path in (folder, folder / "config.json"):
        found, findings = read_generation(path, 9)
        assert found == {
            "token_ids": {"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": None}, "settings": settings,
        }  # fmt: skip
        assert findings == []
    resolved = resolve_model(ModelSpec(config=str(write_generation(tmp_path, LLAMA | {"eos_token_id": 7}))), tmp_path)
    assert resolved.generation == {"token_ids": {"bos_token_id": 1, "eos_token_id": 7}, "settings": {}}


def test_the_row_of_the_padding_token_is_told_of(tmp_path: Path) -> None:
    config = str(write_generation(tmp_path, LLAMA | {"pad_token_id": 7}))
    (finding,) = resolve_model(ModelSpec(config=config), tmp_path).diagnostics
    assert (finding.code, finding.severity) == ("PT691", "warning")
    assert "padding_token: 7" in finding.help
    resolved = resolve_model(ModelSpec(config=config, padding_token=7), tmp_path)
    assert resolved.diagnostics == ()
    assert resolved.config is not None
    assert resolved.config.model_dump()["padding_token"] == 7
    resolved = resolve_model(ModelSpec(config=str(write_generation(tmp_path, LLAMA))), tmp_path)
    assert resolved.diagnostics == ()
    assert resolved.config is not None
    assert "padding_token" not in resolved.config.model_dump(), "checkpoints of earlier versions have no such field"
    (finding,) = resolve_model(ModelSpec(config=config, padding_token=100), tmp_path).diagnostics
    assert finding.code == "PT694"


def test_special_tokens_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    settings = {"eos_token_id": [7, 8], "do_sample": True}
    folder = write_generation(tmp_path, {"eos_token_id": 8, "bos_token_id": "one"}, json.dumps(settings))
    found, (finding,) = read_generation(folder, 8)
    assert found == {"token_ids": {}, "settings": {"do_sample": True}}
    assert finding.code == "PT692"
    for text in ("bos_token_id: 'one'", "eos_token_id: 8 (config.json)", "[7, 8] (generation_config.json)"):
        assert text in finding.message
    found, (finding,) = read_generation(write_generation(tmp_path, {}, "[]"), 2)
    assert (found, finding.code) == ({"token_ids": {"bos_token_id": 1}}, "PT692")
