"""Import and export of Hugging Face folders, against transformers' own models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from partool.spec.model import ModelConfig, RopeScaling, Weights
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import family_of, open_folder, write_folder
from partool_runtime.model import Decoder
from partool_runtime.parallel.weipipe.parts import RingDecoder
from partool_runtime.weights import build, build_parts, fill, materialise, post_load

transformers = pytest.importorskip("transformers")

TOKENS_BS = torch.arange(2 * 19).reshape(2, 19) * 7 % 43
SHAPES = {
    "layers": 3,
    "hidden": 24,
    "ffn_hidden": 44,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 4,
    "vocab": 43,
    "max_position": 64,
}
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16)
LLAMA_LIKE = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 43,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def rope(theta: float, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


LLAMA3_ROPE = rope(
    50_000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
CASES = {
    "llama": (
        ModelConfig(**SHAPES, norm_eps=1e-6, tied_embeddings=True),
        lambda: transformers.LlamaConfig(
            **LLAMA_LIKE | {"tie_word_embeddings": True}, rms_norm_eps=1e-6, **rope(10_000.0)
        ),
    ),
    "llama-scaled-rope-biases": (
        ModelConfig(**SHAPES, rope_theta=50_000.0, rope_scaling=SCALING, qkv_bias=True, out_bias=True, ffn_bias=True),
        lambda: transformers.LlamaConfig(
            **LLAMA_LIKE, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True, **LLAMA3_ROPE
        ),
    ),
    "llama-geglu-wide-heads": (
        ModelConfig(**SHAPES | {"head_dim": 10}, activation="geglu"),
        lambda: transformers.LlamaConfig(
            **LLAMA_LIKE | {"head_dim": 10}, rms_norm_eps=1e-5, hidden_act="gelu", **rope(10_000.0)
        ),
    ),
    "mistral": (
        ModelConfig(**SHAPES, window=5, layer_types=("sliding",) * 3),
        lambda: transformers.MistralConfig(**LLAMA_LIKE, rms_norm_eps=1e-5, sliding_window=5, **rope(10_000.0)),
    ),
    "qwen2": (
        ModelConfig(**SHAPES, qkv_bias=True, rope_theta=1e6, window=4, layer_types=("full", "sliding", "sliding")),
        lambda: transformers.Qwen2Config(
            **LLAMA_LIKE, rms_norm_eps=1e-5, use_sliding_window=True, sliding_window=4, max_window_layers=1, **rope(1e6)
        ),
    ),
    "qwen3": (
        ModelConfig(**SHAPES, qk_norm=True, rope_theta=1e6, tied_embeddings=True),
        lambda: transformers.Qwen3Config(**LLAMA_LIKE | {"tie_word_embeddings": True}, rms_norm_eps=1e-5, **rope(1e6)),
    ),
    "gpt2": (
        ModelConfig(
            **SHAPES | {"kv_heads": 6},
            norm="layernorm",
            position="learned",
            activation="gelu_tanh",
            qkv_bias=True,
            out_bias=True,
            ffn_bias=True,
            tied_embeddings=True,
        ),
        lambda: transformers.GPT2Config(
            n_layer=3,
            n_embd=24,
            n_inner=44,
            n_head=6,
            vocab_size=43,
            n_positions=64,
            bos_token_id=None,
            eos_token_id=None,
        ),
    ),
}


def randomise(model: torch.nn.Module) -> None:
    """Give every parameter, norms and biases too, values that an exchange or an omission would show."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))


def native(config: ModelConfig, path: Path) -> Decoder:
    model = build(config)
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(source="hf", path=str(path)), seed=0)
    post_load(model)
    return model


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # transformers keeps rotation angles in float32 even in a float64 model
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_their_folder(case, tmp_path):
    config, hf_config = CASES[case]
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config()).double().eval()
    randomise(theirs)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with torch.no_grad():
        assert_close(native(config, tmp_path).logits(TOKENS_BS), theirs(TOKENS_BS).logits)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_our_folder(case, tmp_path):
    config, hf_config = CASES[case]
    ours = Decoder(config).double()
    randomise(ours)
    assert write_folder(ours.state_dict(), config, tmp_path).model_type == hf_config().model_type
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        assert_close(ours.logits(TOKENS_BS), theirs.eval()(TOKENS_BS).logits)
    back = native(config, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_with_a_padding_token(tied: bool, tmp_path: Path) -> None:
    """Like transformers, all containers of partool's decoder give the padding token's embedding row no gradient."""
    sizes = LLAMA_LIKE | {"pad_token_id": 7, "tie_word_embeddings": tied}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **rope(10_000.0))).double()
    randomise(theirs)
    theirs.save_pretrained(tmp_path)
    expected = torch.nn.functional.cross_entropy(theirs(TOKENS_BS).logits.flatten(0, 1), TOKENS_BS.flatten())
    expected.backward()
    row = theirs.model.embed_tokens.weight.grad[7]
    assert (row == 0).all() != tied
    assert 7 in TOKENS_BS
    config = ModelConfig(**SHAPES, norm_eps=1e-6, tied_embeddings=tied, padding_token=7)
    with torch.device("meta"):
        ring = RingDecoder(config, ((0, 3),), (0,))
    for model in (build(config), build_parts(config, ((0, 1), (1, 3)), (0, 1)), ring):
        materialise(model, "cpu", torch.float64)
        fill(model, Weights(source="hf", path=str(tmp_path)), seed=0)
        if isinstance(model, Decoder):
            loss = model(TOKENS_BS, TOKENS_BS)
        elif isinstance(model, RingDecoder):
            loss = model.last(model.stages[0](model.first(TOKENS_BS)), TOKENS_BS)
        else:
            loss = model.stages[1](model.stages[0](TOKENS_BS), TOKENS_BS)
        (loss / TOKENS_BS.numel()).backward()
        assert model.embed is not None
        torch.testing.assert_close(model.embed.weight.grad[7], row, rtol=1e-5, atol=1e-9)
    write_folder(model.state_dict(), config, tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").pad_token_id == 7


def save(folder: Path, config: ModelConfig) -> Decoder:
    model = Decoder(config)
    randomise(model)
    write_folder(model.state_dict(), config, folder)
    return model


def test_bare_model_without_config_and_with_leftovers(tmp_path):
    """The hub's first GPT-2 has no prefix and contains its causal masks; its family comes from the configuration."""
    config = CASES["gpt2"][0]
    model = save(tmp_path, config)
    (tmp_path / "config.json").unlink()
    stored = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "lm_head.weight": bare["wte.weight"].clone()}
    save_file(bare, tmp_path / "model.safetensors")
    back = native(config, tmp_path)
    assert all(torch.equal(a.double(), b) for a, b in zip(model.parameters(), back.parameters(), strict=True))


def test_types_are_kept_and_blocks_are_read_alone(tmp_path):
    config = CASES["gpt2"][0]
    model = Decoder(config).bfloat16()
    write_folder(model.state_dict(), config, tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    with open_folder(tmp_path, config) as source:
        for name, parameter in model.named_parameters():
            columns = tuple(size // 3 for size in parameter.shape[1:])
            widths = tuple(size // 2 for size in parameter.shape[1:])
            block = source.block(name, tuple(parameter.shape), (5, *columns), (4, *widths))
            expected = parameter[5:9] if parameter.ndim == 1 else parameter[5:9, columns[0] : columns[0] + widths[0]]
            assert block.dtype == torch.bfloat16
            assert torch.equal(block, expected), name


def damage_nothing(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def damage_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 64)


def damage_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "mamba"}')


def damage_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')


def damage_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def damage_names(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.surprise"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = torch.zeros(7, 24)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (damage_nothing, "PT620", ["holds neither model.safetensors nor"]),
        (damage_file, "PT620", ["model.safetensors cannot be read"]),
        (damage_type, "PT620", ["'mamba'", "Known types: llama, mistral"]),
        (damage_json, "PT620", ["config.json cannot be read"]),
        (damage_index, "PT620", ["gone.safetensors"]),
        (damage_map, "PT620", ["no weight_map"]),
        (
            damage_names,
            "PT621",
            [
                "missing final_norm.weight (model.norm.weight)",
                "unexpected model.surprise",
                "head.weight has shape [43, 24] in the model and [7, 24] in the folder",
            ],
        ),
    ],
)
def test_unusable_folders(damage, code, words, tmp_path):
    config = ModelConfig(**SHAPES)
    save(tmp_path, config)
    damage(tmp_path)
    with pytest.raises(ConfigurationError) as error:
        native(config, tmp_path)
    assert error.value.code == code
    assert all(word in str(error.value) for word in words), str(error.value)


def test_wrong_model_for_a_folder(tmp_path):
    save(tmp_path, ModelConfig(**SHAPES))
    with pytest.raises(ConfigurationError, match=r"PT621(?s:.)*missing layers.0.attention.q.bias"):
        native(ModelConfig(**SHAPES, qkv_bias=True), tmp_path)
    with pytest.raises(ConfigurationError, match=r"PT621(?s:.)*and 18 more"):
        native(ModelConfig(**SHAPES | {"hidden": 20, "ffn_hidden": 40}), tmp_path)
    with pytest.raises(ConfigurationError, match=r"PT620: model.weights.path: no folder"):
        native(ModelConfig(**SHAPES), tmp_path / "missing")
    with pytest.raises(ConfigurationError, match=r"PT620.*needs a path"):
        fill(Decoder(ModelConfig(**SHAPES)), Weights(source="hf"), seed=0)


def test_model_that_no_type_expresses():
    mixed = ModelConfig(**SHAPES, window=4, layer_types=("full", "sliding", "full"))
    with pytest.raises(ConfigurationError) as error:
        family_of(mixed)
    assert error.value.code == "PT624"
    assert "mistral: all layers have the same attention" in error.value.message
    assert family_of(ModelConfig(**SHAPES)).model_type == "llama"
    along = ("row", "column", "row")
    with pytest.raises(ConfigurationError, match="llama: no layer attends along rows or columns"):
        family_of(ModelConfig(**SHAPES, grid=(4, 4), layer_types=along))
