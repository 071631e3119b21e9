"""Adapters in PEFT's format: what is written is read again, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from partool.layout.adapters import frozen_beside, is_adapter
from partool.layout.parameters import is_frozen, parameters
from partool.spec.adapter import LowRank
from partool.spec.model import Mla, ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.peft import CONFIG, WEIGHTS, open_adapter, write_adapter
from partool_runtime.hf.stored import row_order

_SIZES: dict[str, Any] = {"layers": 2, "hidden": 20, "ffn_hidden": 27, "vocab": 31, "head_dim": 4}
GPT2 = _SIZES | {
    "heads": 5, "kv_heads": 5, "norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
    "qkv_bias": True, "out_bias": True, "ffn_bias": True, "tied_embeddings": True,
}  # fmt: skip
LLAMA = _SIZES | {"heads": 6, "kv_heads": 3}
LATENT = _SIZES | {
    "heads": 3, "kv_heads": 3, "head_dim": 7, "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 9, "shared_experts": 1,
    "first_dense_layers": 1, "normalise": False}, "mla": Mla(kv_rank=8, nope_head_dim=3, rope_head_dim=4, v_head_dim=5),
}  # fmt: skip
ADAPTER = LowRank(rank=3, alpha=5.0)
VALUES = LowRank(rank=2, targets=("v", "up"), rslora=True)
DORA = ADAPTER.model_copy(update={"kind": "dora"})
NO_EXPERTS = LowRank(rank=3, alpha=5.0, targets=("layers.*.attention.*", "layers.*.moe.shared.*"))


def config(fields: dict[str, Any], adapter: LowRank = ADAPTER) -> ModelConfig:
    return ModelConfig.model_validate(fields | {"adapter": adapter})


def drawn(model: ModelConfig, train: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return values of the trained parameters, of which none is like another."""
    infos = parameters(model)
    patterns = frozen_beside([info.name for info in infos], train)
    generator = torch.Generator().manual_seed(5)
    return {
        info.name: torch.randn(info.shape, generator=generator, dtype=torch.float64)
        for info in infos
        if not is_frozen(info.name, patterns)
    }


def read(path: Path, model: ModelConfig) -> dict[str, torch.Tensor]:
    shapes = {info.name: info.shape for info in parameters(model)}
    with open_adapter(path, model) as folder:
        folder.check(shapes)
        return {n: folder.block(n, s, (0,) * len(s), s) for n, s in shapes.items() if is_adapter(n)}


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        (LLAMA, ADAPTER),
        (GPT2, ADAPTER),
        (GPT2, VALUES),
        (LATENT, NO_EXPERTS),
        (LATENT, ADAPTER),
        (LATENT, LowRank(rank=2, targets=("o", "layers.*.experts.up"))),
        (LLAMA, DORA),
        (GPT2, DORA),
        (LATENT, NO_EXPERTS.model_copy(update={"kind": "dora"})),
    ],
    ids=[
        "llama",
        "gpt2",
        "gpt2 values alone",
        "latent",
        "experts",
        "experts' up alone",
        "dora",
        "dora gpt2",
        "dora latent",
    ],
)
def test_what_is_written_is_read(tmp_path: Path, fields: dict[str, Any], adapter: LowRank) -> None:
    model = config(fields, adapter)
    state = drawn(model)
    write_adapter(state, model, tmp_path, base="")
    got = read(tmp_path, model)
    assert got.keys() == state.keys()
    assert all(torch.equal(got[name], value) for name, value in state.items())
    shape = state["layers.1.attention.v.lora_b" if fields is GPT2 else "layers.1.attention.o.lora_b"].shape
    name = "layers.1.attention.v.lora_b" if fields is GPT2 else "layers.1.attention.o.lora_b"
    with open_adapter(tmp_path, model) as folder:
        block = folder.block(name, tuple(shape), (1, 1), (3, 1))
    assert torch.equal(block, state[name][1:4, 1:2])


def test_joined_matrices_get_one_adapter_of_blocks(tmp_path: Path) -> None:
    """The sum of the joined matrix is that of each part, at the scale of the pattern."""
    model = config(GPT2)
    state = drawn(model)
    write_adapter(state, model, tmp_path, base="")
    settings, tensors = json.loads((tmp_path / CONFIG).read_text()), load_file(tmp_path / WEIGHTS)
    name = "transformer.h.0.attn.c_attn"
    a, b = (tensors[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
    rank, alpha = settings["rank_pattern"][name], settings["alpha_pattern"][name]
    assert (len(a), b.shape[1]) == (rank, rank)
    parts = [state[f"layers.0.attention.{p}.lora_b"] @ state[f"layers.0.attention.{p}.lora_a"] for p in "qkv"]
    torch.testing.assert_close(alpha / rank * b @ a, ADAPTER.scale * torch.cat(parts))


def test_one_adapter_of_joined_matrices_is_shared(tmp_path: Path) -> None:
    """PEFT's own adapter of c_attn has one A, which queries, keys and values start with."""
    model = config(GPT2, LowRank(rank=3, alpha=5.0, targets=("q", "k", "v")))
    state = drawn(model)
    write_adapter(state, model, tmp_path, base="")
    tensors = {
        name: (tensor[:3] if "lora_A" in name else tensor[:, 6:]).contiguous()
        for name, tensor in load_file(tmp_path / WEIGHTS).items()
    }
    save_file(tensors, tmp_path / WEIGHTS)
    got = read(tmp_path, model)
    for part, first in (("q", 0), ("k", 20), ("v", 40)):
        prefix = f"layers.1.attention.{part}"
        stored = tensors["base_model.model.transformer.h.1.attn.c_attn.lora_B.weight"]
        assert torch.equal(got[f"{prefix}.lora_a"], state["layers.1.attention.q.lora_a"])
        assert torch.equal(got[f"{prefix}.lora_b"], stored[first : first + 20])


def test_rotated_rows_are_in_the_order_of_the_folder(tmp_path: Path) -> None:
    model = config(LATENT, NO_EXPERTS)
    state = drawn(model)
    write_adapter(state, model, tmp_path, base="")
    stored = load_file(tmp_path / WEIGHTS)["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert model.mla is not None
    order = row_order(model.mla, "heads", len(stored))
    assert torch.equal(stored[order], state["layers.0.attention.q.lora_b"])
    assert not torch.equal(order, torch.arange(len(order)))


def test_whole_matrices_are_saved_beside(tmp_path: Path) -> None:
    model = config(LLAMA)
    state = drawn(model, ("head", "norms"))
    write_adapter(state, model, tmp_path, base="base")
    settings, tensors = json.loads((tmp_path / CONFIG).read_text()), load_file(tmp_path / WEIGHTS)
    assert torch.equal(tensors["base_model.model.lm_head.weight"], state["head.weight"])
    assert settings["modules_to_save"] == ["input_layernorm", "lm_head", "norm", "post_attention_layernorm"]
    assert settings["base_model_name_or_path"] == "base"
    with pytest.raises(ConfigurationError, match="lm_head"):
        read(tmp_path, model)


def test_experts_have_one_adapter_per_tensor(tmp_path: Path) -> None:
    """As PEFT computes it: ``einsum("o r e, e r i -> e o i", B, A)``, gate rows before up rows."""
    model = config(LATENT)
    state = drawn(model)
    write_adapter(state, model, tmp_path, base="")
    settings, tensors = json.loads((tmp_path / CONFIG).read_text()), load_file(tmp_path / WEIGHTS)
    target = "model.layers.1.mlp.experts"
    assert {f"{target}.gate_up_proj", f"{target}.down_proj"} <= set(settings["target_parameters"])
    assert not any("experts" in name for name in settings["target_modules"] if "shared" not in name)
    owners = {"gate_up_proj": f"{target}.base_layer", "down_proj": target}
    for tensor, names in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        a, b = (tensors[f"base_model.model.{owners[tensor]}.lora_{each}.weight"] for each in "AB")
        delta = torch.einsum("ore,eri->eoi", b.view(len(b), -1, 4), a.view(4, -1, a.shape[1]))
        rank = settings["rank_pattern"].get(f"{target}.{tensor}", 3)
        scale = settings["alpha_pattern"].get(f"{target}.{tensor}", 5.0) / rank
        parts = []
        for each in names:
            low_a, low_b = (state[f"layers.1.moe.experts.{each}.lora_{x}"].chunk(4) for x in "ab")
            parts.append(torch.stack([y @ x for x, y in zip(low_a, low_b, strict=True)]))
        torch.testing.assert_close(scale * delta, ADAPTER.scale * torch.cat(parts, dim=1))


def test_gate_and_up_may_share_one_adapter(tmp_path: Path) -> None:
    """PEFT's own adapter of the tensor of gates and ups has one A, which both start with."""
    model = config(LATENT)
    state = drawn(model)
    write_adapter(state, model, tmp_path, base="")
    tensors, settings = load_file(tmp_path / WEIGHTS), json.loads((tmp_path / CONFIG).read_text())
    owner = "base_model.model.model.layers.1.mlp.experts.base_layer"
    a, b = torch.randn(4 * 3, 20), torch.randn(18, 3 * 4)
    tensors |= {f"{owner}.lora_A.weight": a, f"{owner}.lora_B.weight": b}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(settings | {"rank_pattern": {}, "alpha_pattern": {}}))
    got = read(tmp_path, model)
    assert torch.equal(got["layers.1.moe.experts.gate.lora_a"], a)
    assert torch.equal(got["layers.1.moe.experts.up.lora_a"], a)
    up_e = b.view(18, 3, 4)[9:, :, 2]
    assert torch.equal(got["layers.1.moe.experts.up.lora_b"][18:27], up_e)


def test_magnitudes_of_some_joined_rows_are_refused(tmp_path: Path) -> None:
    model = config(GPT2, DORA.model_copy(update={"targets": ("v",)}))
    with pytest.raises(ConfigurationError, match="magnitudes of all rows") as error:
        write_adapter(drawn(model), model, tmp_path, base="")
    assert error.value.code == "PT624"


def test_another_scale_of_a_module_is_refused(tmp_path: Path) -> None:
    write_adapter(drawn(config(LLAMA)), config(LLAMA), tmp_path, base="")
    settings = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(settings | {"alpha_pattern": {"q_proj": 6.0}}))
    with pytest.raises(ConfigurationError, match=r"q_proj has the scale 2 in the folder and 1\.66667 in"):
        read(tmp_path, config(LLAMA))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rank": 4}, "r is 3 there and 4 here"),
        ({"alpha": 4.0}, "lora_alpha is 5.0 there and 4.0 here"),
        ({"rslora": True}, "use_rslora is False there and True here"),
        ({"kind": "dora"}, "use_dora is False there and True here"),
        ({"targets": ("q", "k")}, "unexpected base_model"),
    ],
)
def test_another_adapter_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    write_adapter(drawn(config(LLAMA)), config(LLAMA), tmp_path, base="")
    with pytest.raises(ConfigurationError, match=expected) as error:
        read(tmp_path, config(LLAMA, ADAPTER.model_copy(update=changes)))
    assert error.value.code == "PT621"


def test_missing_matrices_are_named(tmp_path: Path) -> None:
    few = config(LLAMA, LowRank(rank=3, alpha=5.0, targets=("q",)))
    write_adapter(drawn(few), few, tmp_path, base="")
    with pytest.raises(ConfigurationError, match=r"missing layers.0.attention.k.lora_a \(base_model"):
        read(tmp_path, config(LLAMA))
    with pytest.raises(ConfigurationError, match=r"adapter_config.json cannot be read") as error:
        read(tmp_path / "nowhere", few)
    assert error.value.code == "PT620"
