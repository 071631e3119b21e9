"""Adapters of partool's decoder: names, first values, dropout, and the checksum of what stays frozen."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from partool.layout.adapters import frozen_beside, is_adapter
from partool.layout.parameters import is_frozen, parameters
from partool.spec.adapter import LowRank
from partool.spec.model import Mla, ModelConfig, Weights
from partool_runtime.model import Decoder
from partool_runtime.model.adapter import Adapted
from partool_runtime.model.dropout import column_hashes, dropped, token_keys
from partool_runtime.model.projection import Linear
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_networks
from partool_runtime.weights import checksum, fill, frozen_of
from partool_runtime.weights.draw import adapter_source

_SIZES: dict[str, Any] = {
    "layers": 3, "hidden": 20, "ffn_hidden": 27, "heads": 6, "kv_heads": 3, "head_dim": 4, "vocab": 31
}  # fmt: skip
BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "activation": "gelu", "qk_norm": True}
LATENT = {
    "heads": 3, "kv_heads": 3, "head_dim": 7, "mla": Mla(q_rank=9, kv_rank=8, nope_head_dim=3, rope_head_dim=4,
    v_head_dim=5), "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 9, "shared_experts": 1, "first_dense_layers": 1},
}  # fmt: skip


def config(fields: dict[str, Any] | None = None, **adapter: Any) -> ModelConfig:
    return ModelConfig.model_validate(_SIZES | (fields or {}) | {"adapter": LowRank(rank=3, **adapter)})


@pytest.mark.parametrize("fields", [{}, BIASED, LATENT], ids=["plain", "biased", "latent experts"])
@pytest.mark.parametrize("targets", ["all-linear", ("q", "down_proj", "layers.1.ffn.*", "kv_b", "layers.*.experts.up")])
def test_modules_have_the_listed_parameters(fields: dict[str, Any], targets: Any) -> None:
    model = config(fields, targets=targets)
    listed = [(info.name, info.shape) for info in parameters(model)]
    assert [(name, tuple(p.shape)) for name, p in Decoder(model).named_parameters()] == listed
    assert any(is_adapter(name) for name, _ in listed)


def test_only_targets_are_adapted() -> None:
    decoder = Decoder(config(targets=("v_proj", "layers.2.ffn.*")))
    adapted = {name for name, module in decoder.named_modules() if isinstance(module, Adapted)}
    assert adapted == {f"layers.{i}.attention.v" for i in range(3)} | {
        f"layers.2.ffn.{n}" for n in ("gate", "up", "down")
    }
    others = [m for n, m in decoder.named_modules() if isinstance(m, Linear) and n not in adapted]
    assert others
    assert all(module.matrix is module.weight for module in others)


def test_frozen_patterns_leave_what_is_trained() -> None:
    """Layers are merged where they are alike, and named where one of them is trained."""
    names = [info.name for info in parameters(config())]
    patterns = frozen_beside(names, ["norms", "layers.1.ffn.up.weight", "head"])
    trained = {name for name in names if not is_frozen(name, patterns)}
    assert {name for name in trained if not is_adapter(name)} == {
        *(name for name in names if "norm" in name), "layers.1.ffn.up.weight", "head.weight",
    }  # fmt: skip
    assert "layers.*.attention.q.weight" in patterns
    assert {"layers.0.ffn.up.weight", "layers.2.ffn.up.weight"} <= set(patterns)


def test_first_values_are_those_of_peft() -> None:
    """A is uniform within ±1/√columns (Kaiming's bound with a = √5), in any block of it; B is zero."""
    source, shape = adapter_source(7), (300, 400)
    name = "layers.0.ffn.up.lora_a"
    a = source(name, shape, (0, 0), shape)
    assert 0.99 * 400**-0.5 < float(a.abs().max()) <= 400**-0.5
    assert float(a.std()) == pytest.approx(400**-0.5 / 3**0.5, rel=0.01)
    assert abs(float(a.mean())) < 3 * float(a.std()) / a.numel() ** 0.5
    assert torch.equal(source(name, shape, (170, 3), (60, 9)), a[170:230, 3:12])
    assert not source("layers.0.ffn.up.lora_b", shape, (0, 0), shape).any()
    assert not torch.equal(adapter_source(8)(name, shape, (0, 0), shape), a)


def filled(model: ModelConfig) -> Decoder:
    """Return a decoder with drawn weights and B ≠ 0."""
    decoder = Decoder(model).double()
    fill(decoder, Weights(), seed=3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora_b"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return decoder


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(
    ("policy", "tile"), [("selective", 0), ("full", 0), ("attention", 0), ("none", 3), ("full", 3)]
)
def test_dropout_is_repeated_by_recomputation_and_in_tiles(policy: Any, tile: int, kind: Any) -> None:
    """Two micro-batches are in flight, and the first one's gradients come after the second one's pass."""
    results = []
    for each, tokens in (("none", 0), (policy, tile)):
        decoder = filled(config(kind=kind, dropout=0.5))
        tile_networks(decoder.layers, tokens)
        recompute(decoder.layers, [each] * 3, tiled=tokens > 0)
        losses = []
        for first in (5, 9):
            decoder.contexts.first_sequence = first
            batch = torch.arange(first, first + 14).view(2, 7)
            losses.append(decoder(batch, batch))
        for loss in losses:
            loss.backward()
        grads = {name: p.grad for name, p in decoder.named_parameters() if is_adapter(name)}
        results.append(grads | {f"loss {number}": loss.detach() for number, loss in enumerate(losses)})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-12, atol=1e-12)


def test_dropout_is_for_training() -> None:
    dropping, plain = filled(config(dropout=0.5)), filled(config())
    tokens = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert torch.equal(dropping(tokens, tokens), plain(tokens, tokens))
    assert not torch.equal(dropping(tokens, tokens), plain(tokens, tokens))


def test_dropout_keeps_the_mean() -> None:
    layer = filled(config(dropout=0.25)).layers[0]
    adapted = layer.attention.q
    assert isinstance(adapted, Adapted)
    x = torch.ones(1, 1, 20, dtype=torch.float64)
    expected = adapted(x)[0, 0]
    layer.masks.keys_BS = token_keys(3, 7, 40, torch.arange(1000))
    mean = adapted(x.expand(40, 1000, -1)).mean((0, 1))
    torch.testing.assert_close(mean, expected, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_dropout_concerns_what_the_adapter_changes(kind: Any) -> None:
    """As in PEFT: W x has the input, what is added has what is left of it."""
    layer = filled(config(dropout=0.25, kind=kind)).layers[1]
    adapted, x = layer.ffn.down, torch.randn(2, 7, 27, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert isinstance(adapted, Adapted)
    layer.masks.keys_BS = token_keys(3, 7, 2, torch.arange(7))
    left = dropped(x, layer.masks.keys_BS, column_hashes("layers.1.ffn.down", [(0, 27)]), 0.25)
    assert 0.6 < float((left != 0).double().mean()) < 0.9
    torch.testing.assert_close(left[left != 0], (x / 0.75)[left != 0])
    low = 32 / 3 * adapted.lora_b @ adapted.lora_a
    if adapted.magnitude is None:
        expected = x @ adapted.weight.T + left @ low.T
    else:
        both = adapted.weight + low
        scaled = (adapted.magnitude / both.norm(dim=1))[:, None] * both
        expected = x @ adapted.weight.T + left @ (scaled - adapted.weight).T
    torch.testing.assert_close(adapted(x), expected, rtol=1e-12, atol=1e-12)


def test_masks_are_those_of_an_element_whoever_holds_it() -> None:
    keys = token_keys(3, 7, 4, torch.arange(9))
    assert torch.equal(token_keys(3, 8, 2, torch.tensor([8, 2])), keys[1:3][:, [8, 2]])
    hashes = column_hashes("layers.1.ffn.down", [(0, 27)])
    assert torch.equal(column_hashes("layers.1.ffn.down", [(20, 27), (3, 5)]), hashes[[*range(20, 27), 3, 4]])
    assert not torch.equal(column_hashes("layers.2.ffn.down", [(0, 27)]), hashes)
    x = torch.ones(4, 9, 27)
    masks = [dropped(x, token_keys(3, first, 4, torch.arange(9)), hashes, 0.5) for first in (0, 4, 2**20)]
    for one, other in combinations(masks, 2):
        assert 0.4 < float((one == other).double().mean()) < 0.6


def test_magnitudes_begin_as_the_norms_of_rows() -> None:
    decoder = Decoder(config(kind="dora")).double()
    fill(decoder, Weights(), seed=3)
    named = dict(decoder.named_parameters())
    assert sum(name.endswith(".magnitude") for name in named) == 21
    for name, parameter in named.items():
        if name.endswith(".magnitude"):
            torch.testing.assert_close(parameter, named[name.replace("magnitude", "weight")].norm(dim=1))
    plain = Decoder(config()).double()
    fill(plain, Weights(), seed=3)
    tokens = torch.arange(14).view(2, 7)
    torch.testing.assert_close(decoder(tokens, tokens), plain(tokens, tokens), rtol=1e-12, atol=1e-12)


def test_the_checksum_sees_each_bit() -> None:
    decoder = filled(config())
    names = frozen_of(decoder, frozen_beside([n for n, _ in decoder.named_parameters()], []))
    first = checksum(decoder, names, None)
    assert checksum(filled(config()), names, None) == first
    parameter = dict(decoder.named_parameters())["layers.1.ffn.up.weight"]
    with torch.no_grad():
        kept = parameter[3, 4].clone()
        parameter[3, 4] = kept * (1 + 2**-52)
        assert checksum(decoder, names, None) != first
        parameter[3, 4] = kept
        rows = parameter.clone()
        parameter[[0, 1]] = parameter[[1, 0]]
        assert checksum(decoder, names, None) != first
        parameter.copy_(rows)
        parameter[:, [0, 1]] = parameter[:, [1, 0]]
        assert checksum(decoder, names, None) != first
        parameter.copy_(rows)
    assert checksum(decoder, names, None) == first
    assert checksum(decoder.to(torch.bfloat16), names, None) != first
