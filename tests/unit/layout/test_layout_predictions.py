"""Parameters, prices and layouts of modules for multi-token prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partool.catalog.models import resolve_model
from partool.cost.training.predict import attention_flops_per_token, matmul_flops_per_token
from partool.layout.gemms import gemms
from partool.layout.parameters import count, groups, parameters
from partool.layout.tensor import own_partition
from partool.spec.model import ModelConfig, ModelSpec, MultiToken
from partool.work.blocks import divided_model

SIZES: dict[str, Any] = {
    "layers": 3, "hidden": 30, "ffn_hidden": 37, "heads": 5, "kv_heads": 5, "head_dim": 6, "vocab": 257,
}  # fmt: skip
PLAIN, TWO = ModelConfig(**SIZES), ModelConfig(**SIZES, multi_token=MultiToken(depth=2))
BLOCK = 4 * 30 * 30 + 3 * 30 * 37 + 2 * 30
MODULE = BLOCK + 2 * 30 * 30 + 3 * 30


def deepseek(**more: Any) -> ModelConfig:
    config = resolve_model(ModelSpec(preset="deepseek-v3", **more), Path()).config
    assert config is not None
    return config


def test_a_module_has_a_block_and_shares_embedding_and_head() -> None:
    assert count(parameters(TWO)) == count(parameters(PLAIN)) + 2 * MODULE
    by_group = groups(TWO)
    assert len(by_group) == 1 + 5 + 1
    assert count(by_group[4]) == count(by_group[5]) == BLOCK
    assert count(by_group[-1]) - count(groups(PLAIN)[-1]) == 2 * (MODULE - BLOCK)


def test_deepseek_v3_has_the_published_numbers() -> None:
    """671 B parameters, and 11.5 B of the module itself; with copies of embedding and head, 14 B more in the folder.

    Source: README.md and README_WEIGHTS.md of deepseek-ai/DeepSeek-V3.
    """
    model, without = deepseek(multi_token=MultiToken(depth=1)), deepseek()
    assert without.multi_token is None
    module = count(parameters(model)) - count(parameters(without))
    assert count(parameters(without)) / 1e9 == pytest.approx(671.0, abs=0.5)
    assert module / 1e9 == pytest.approx(11.5, abs=0.15)
    copies = 2 * model.vocab * model.hidden
    assert (count(parameters(without)) + module + copies) / 1e9 == pytest.approx(685, abs=1)
    assert model.is_moe_layer(61)


def test_layers_of_prices_are_blocks() -> None:
    divided = divided_model(TWO)
    assert divided_model(PLAIN) is PLAIN
    assert (divided.layers, divided.blocks) == (5, 5)
    assert count(parameters(divided)) == count(parameters(TWO))
    windowed = ModelConfig(**SIZES, window=4, layer_types=("full", "full", "sliding"), multi_token=MultiToken(depth=2))
    assert divided_model(windowed).layer_types == ("full", "full", "sliding", "sliding", "sliding")


def test_flops_are_those_of_a_layer_a_head_and_a_projection_more() -> None:
    layer = 2.0 * (BLOCK - 2 * 30)
    more = matmul_flops_per_token(divided_model(TWO)) - matmul_flops_per_token(PLAIN)
    assert more == 2 * (layer + 2.0 * 257 * 30 + 2.0 * 2 * 30 * 30)
    scores = [attention_flops_per_token(divided_model(model), 16) for model in (PLAIN, TWO)]
    assert scores[1] == pytest.approx(scores[0] * 5 / 3)
    products = {gemm.name: gemm for gemm in gemms(TWO, tensor=1, expert=1, tokens=7)}
    assert (products["head"].layers, products["predictions.projection"].layers) == (3, 2)
    total = sum(gemm.flops * gemm.layers for gemm in products.values())
    assert total == pytest.approx(7 * matmul_flops_per_token(divided_model(TWO)))


def test_tensor_ranks_all_have_the_projection() -> None:
    for shares, gradients in ((False, "whole"), (True, "summed")):
        rows = {row.name: row for row in own_partition(TWO, 2, 1, shares)}
        (row,) = (row for name, row in rows.items() if name.endswith(".projection.weight"))
        assert (row.style, row.cuts, row.gradients) == ("replicated", (), gradients)
