"""Models of transformers as the runtime builds, describes and fills them, in one process without ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partool.layout.parameters import count, parameters
from partool.layout.tensor.structure import Structure
from partool.plan.types import HfModel
from partool.spec.model import ModelConfig, Weights
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import structure
from partool_runtime.hf.building import build_causal, say_as_json
from partool_runtime.hf.experts import plain_where_odd
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.numerics import KeepWide
from partool_runtime.hf.structure import describe
from partool_runtime.weights import fill, materialise, post_load

sys.path.insert(0, str(Path(__file__).parents[3] / "parity"))
from _hf_models import MODELS, write_model

SMALL = {
    "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "num_hidden_layers": 2, "vocab_size": 11, "pad_token_id": 0,
}  # fmt: skip
SMALL_VISION = {
    "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
KINDS = ("llama", "qwen3_deep", "mixtral", "gpt_neox", "phi", "deepseek_v2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_model(kind, folder) for kind in KINDS}


def config_of(described: dict[str, Any]) -> ModelConfig:
    return ModelConfig.model_validate(described["fields"], strict=False)


def decoder(path: Path) -> HfDecoder:
    described = describe(path)
    hf = HfModel(path=str(path), model_type=described["structure"]["model_type"], architecture="X")
    return HfDecoder(hf, config_of(described))


@pytest.mark.parametrize("kind", KINDS)
def test_descriptions_name_every_parameter_and_price_it(folders: dict[str, Path], kind: str) -> None:
    described = json.loads(json.dumps(describe(folders[kind])))
    structure = Structure.model_validate(described["structure"])
    causal = build_causal(folders[kind])
    shapes = {name: tuple(parameter.shape) for name, parameter in causal.named_parameters()}
    assert structure.shapes() == shapes
    assert structure.heads == MODELS[kind]["num_attention_heads"]
    elements, priced = sum(p.numel() for p in causal.parameters()), count(parameters(config_of(described)))
    assert abs(priced - elements) <= 0.02 * elements
    assert (described["head_problem"], described["pipeline_problem"], described["draws"]) == ("", "", False)


@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_of_a_folder_arrive(folders: dict[str, Path], kind: str) -> None:
    import transformers

    model = decoder(folders[kind])
    materialise(model, "cpu")
    fill(model, Weights(source="hf", path=str(folders[kind])), seed=0)
    post_load(model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    state = dict(theirs.named_parameters())
    assert {name for name, _ in model.named_parameters()} == set(state)
    assert all(torch.equal(parameter, state[name]) for name, parameter in model.named_parameters())
    values = dict(theirs.named_buffers())
    assert all(torch.equal(buffer, values[name]) for name, buffer in model.named_buffers())


def test_first_weights_are_those_of_the_models_own_code(folders: dict[str, Path]) -> None:
    model = decoder(folders["phi"])
    materialise(model, "cpu")
    for source in ("init", "dummy"):
        fill(model, Weights(source=source), seed=1)
        post_load(model)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                assert set(parameter.tolist()) == {0.0 if name.endswith("bias") else 1.0}, name
            elif source == "init":
                assert abs(float(parameter.detach().std()) - 0.2) < 0.05, name


def test_values_of_vectors_that_are_not_one(tmp_path: Path) -> None:
    """Gemma's norms multiply by 1 + weight, and the weight is initialised to zero."""
    import transformers

    config = transformers.GemmaConfig(
        hidden_size=16, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_hidden_layers=1, vocab_size=11, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = decoder(tmp_path)
    norms = [name for name, shape in model.whole_shapes().items() if len(shape) == 1]
    assert norms
    assert {model.constants[name] for name in norms} == {0.0}


def test_what_does_not_fit_a_folder_is_named(folders: dict[str, Path]) -> None:
    model = decoder(folders["qwen3_deep"])
    materialise(model, "cpu")
    with pytest.raises(ConfigurationError, match=r"missing model\.layers\.0\.self_attn\.q_norm\.weight") as caught:
        fill(model, Weights(source="hf", path=str(folders["llama"])), seed=0)
    assert caught.value.code == "PT621"


def test_blocks_of_stacked_experts_are_read_alone(folders: dict[str, Path]) -> None:
    model = decoder(folders["mixtral"])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    shape = model.whole_shapes()[name]
    with model.open_weights(folders["mixtral"]) as files:
        whole = files.block(name, shape, (0, 0, 0), shape)
        # Across the boundary between gate and up, in the middle of the experts.
        part = files.block(name, shape, (1, 10, 3), (2, 7, 5))
    assert torch.equal(part, whole[1:3, 10:17, 3:8])


def test_experts_of_odd_width_train_in_float32(folders: dict[str, Path]) -> None:
    """torch's grouped product only takes rows whose size is a multiple of 16 bytes."""
    model = decoder(folders["mixtral"])
    materialise(model, "cpu")
    fill(model, Weights(source="hf", path=str(folders["mixtral"])), seed=0)
    post_load(model)
    tokens = torch.arange(14).view(2, 7)
    model(tokens, tokens).backward()
    gradient = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").grad
    assert gradient is not None
    assert bool(gradient.isfinite().all() & (gradient != 0).any())


@pytest.mark.parametrize(("widths", "implementation"), [((24, 16), "grouped_mm"), ((24, 12), "eager")])
def test_experts_are_multiplied_in_groups_where_that_can_be(widths: tuple[int, int], implementation: str) -> None:
    config = SimpleNamespace(_experts_implementation="grouped_mm")
    module = torch.nn.Module()
    module.config = config  # type: ignore[assignment]
    plain_where_odd(module, [(3, *widths), (3, widths[1], widths[0]), (5,)])
    assert module.config._experts_implementation == implementation  # type: ignore[union-attr]
    assert config._experts_implementation == "grouped_mm", "other modules have it too"


def test_logits_that_are_no_product_are_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.Gemma2Config(
        hidden_size=16, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_hidden_layers=2, vocab_size=11, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert "capping" in describe(tmp_path)["head_problem"]


def test_state_in_buffers_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    import transformers

    config = transformers.DeepseekV3Config(
        hidden_size=16, intermediate_size=8, moe_intermediate_size=8, num_attention_heads=2, num_key_value_heads=2,
        q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, num_hidden_layers=2, vocab_size=11,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"model\.layers\.1\.mlp\.gate\.e_score_correction_bias") as caught:
        describe(tmp_path)
    assert caught.value.code == "PT649"
    hf = HfModel(path=str(tmp_path), model_type="deepseek_v3", architecture="X")
    with pytest.raises(ConfigurationError, match="PT649"):
        HfDecoder(hf, config_of(describe(folders["llama"])))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": True, "num_kv_heads": 2}, 1),
        ({"multi_query": False}, 4),
    ],
)
def test_falcons_heads_of_keys_are_those_of_its_matrices(fields: dict[str, Any], expected: int, tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 11}
    transformers.FalconConfig(**sizes | fields).save_pretrained(tmp_path)
    described = describe(tmp_path)
    assert described["fields"]["kv_heads"] == described["structure"]["kv_heads"] == expected
    (fused,) = {m["parameters"]["weight"][0] for m in described["structure"]["modules"] if "query_key" in m["name"]}
    assert fused == (4 + 2 * expected) * 8


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        (
            "mamba",
            {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2},
            "MambaConfig has no num_attention_heads",
        ),
        ("gemma3", {"text_config": SMALL, "vision_config": SMALL_VISION}, "its language model is one part of it"),
    ],
)
def test_models_without_attention_or_with_more_than_text_are_refused(
    kind: str, fields: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    transformers.CONFIG_MAPPING[kind](**fields).save_pretrained(tmp_path)
    assert say_as_json(structure.describe, [str(tmp_path)]) == 78
    said = json.loads(capsys.readouterr().out)["error"]
    assert said["code"] == "PT644"
    assert why in said["message"]


def test_what_a_models_code_raises_is_a_finding(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(structure, "returns_tuples", lambda *args: args[7])
    assert say_as_json(structure.describe, [str(folders["llama"])]) == 78
    assert "IndexError: tuple index out of range" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_learned_positions_cannot_be_cut(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=11, bos_token_id=None, eos_token_id=None)
    config.save_pretrained(tmp_path)
    described = describe(tmp_path)
    assert "it looks up wpe" in described["pipeline_problem"]
    assert described["draws"], "GPT-2 has dropout"


def test_folders_that_transformers_cannot_build(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_causal(tmp_path)
    assert caught.value.code == "PT643"


def test_float64_stays_wide() -> None:
    x = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    with KeepWide():
        assert x.float().dtype == x.to(torch.float32).dtype == torch.float64
        assert torch.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
        assert x.bfloat16().float().dtype == torch.float32
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float32
