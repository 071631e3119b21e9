"""Networks of transformers in tiles, and what is kept of their layers, against the same models without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from partool.plan.types import HfModel
from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.building import build_causal
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.sizes import model_fields
from partool_runtime.hf.structure import describe, networks
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_loss, tile_networks
from partool_runtime.weights import materialise

VOCAB, LENGTH, TILE = 31, 11, 4
COMMON: dict[str, Any] = {
    "num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 16, "hidden_size": 24,
    "intermediate_size": 13, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    # What comes behind the network is normalised once more, and its result is kept.
    "olmo2": {},
    "gemma2": {"head_dim": 6, "sliding_window": 5},
}


def folder_of(family: str, folder: Path, **fields: Any) -> Path:
    config = transformers.CONFIG_MAPPING[family](**COMMON | MODELS.get(family, {}) | fields)
    config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def built(path: Path) -> HfDecoder:
    causal = build_causal(path)
    config = ModelConfig.model_validate(model_fields(causal, causal.config), strict=False)
    hf = HfModel(path=str(path), model_type=causal.config.model_type, architecture=type(causal).__name__)
    model = HfDecoder(hf, config, wide=True).double()
    materialise(model, torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(0, VOCAB, (2, LENGTH), generator=generator) for _ in range(2))
    model(tokens, labels).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", MODELS)
def test_tiles_and_kept_attention_change_nothing(family: str, tmp_path: Path) -> None:
    path = folder_of(family, tmp_path)
    wanted = gradients(built(path))
    for policy, tile in (("none", TILE), ("full", TILE), ("keep_attention", TILE), ("keep_attention", 0)):
        model = built(path)
        tile_networks(model.layers, tile)
        tile_loss(model, tile)
        recompute(model.layers, [policy] * 2, tiled=tile > 0)  # type: ignore[list-item]
        got = gradients(model)
        assert got.keys() == wanted.keys()
        for name, expected in wanted.items():
            limit = 1e-12 * max(1.0, float(expected.abs().max()))
            assert float((got[name] - expected).abs().max()) <= limit, f"{family}, {policy}, {tile}: {name}"


def test_networks_are_found_by_what_they_are(tmp_path: Path) -> None:
    model = built(folder_of("llama", tmp_path))
    assert [type(network).__name__ for network in networks(model.layers[0])] == ["LlamaMLP"]
    assert describe(tmp_path)["tiles_problem"] == ""


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("gpt2", {"resid_pdrop": 0.1}, "GPT2MLP draws random numbers"),
        ("mixtral", {"num_local_experts": 4}, "MixtralDecoderLayer has no network of its own"),
        ("bloom", {"n_head": 4}, "BloomBlock has no network of its own"),
    ],
)
def test_what_is_no_function_of_single_tokens_is_told(
    family: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = folder_of(family, tmp_path, **fields)
    assert describe(path)["tiles_problem"].startswith(why)


def test_a_layer_without_a_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="PT657"):
        tile_networks([nn.Sequential(nn.Linear(3, 3))], TILE)
