"""Shapes of a rank's matrix products: they add up to the model's parameters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.catalog.models import resolve_model
from partool.cost.training.predict import matmul_flops_per_token
from partool.layout.gemms import Gemm, gemms
from partool.layout.parameters import count, parameters
from partool.spec.model import ModelConfig, ModelSpec


def model(preset: str) -> ModelConfig:
    from pathlib import Path

    config = resolve_model(ModelSpec(preset=preset), Path()).config
    assert config is not None
    return config


def elements(gemm: Gemm) -> int:
    return gemm.alike * gemm.n * gemm.k * gemm.groups * gemm.layers


@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2-xl", "mixtral-8x7b", "deepseek-v3"])
def test_shapes_hold_every_weight_once(preset: str) -> None:
    config = model(preset)
    weights = [info for info in parameters(config) if info.kind in ("attention", "ffn", "expert", "router", "head")]
    matrices = count(info for info in weights if len(info.shape) > 1)
    found = gemms(config, tensor=1, expert=1, tokens=64)
    head = next(gemm for gemm in found if gemm.name == "head")
    assert sum(map(elements, found)) == matrices + (elements(head) if config.tied_embeddings else 0)


def test_tensor_ranks_share_and_experts_move() -> None:
    dense = {gemm.name: (gemm.n, gemm.k) for gemm in gemms(model("llama3-8b"), tensor=8, expert=1, tokens=8)}
    assert dense == {
        "attention.q": (512, 4096),
        "attention.k, v": (128, 4096),
        "attention.o": (4096, 512),
        "ffn.gate, up": (1792, 4096),
        "ffn.down": (4096, 1792),
        "head": (16032, 4096),
    }
    wide = {gemm.name: gemm.n for gemm in gemms(model("llama3-8b"), tensor=32, expert=1, tokens=8)}
    assert wide["attention.k, v"] == 128  # fewer key heads than ranks: each rank holds a whole head
    experts = {gemm.name: gemm for gemm in gemms(model("mixtral-8x7b"), tensor=2, expert=4, tokens=100)}
    up = experts["moe.experts.gate, up"]
    assert (up.groups, up.n, up.rows.least, up.rows.most) == (2, 14336, 0, 200)
    assert experts["attention.q"].backward == ((100, 4096, 2048), (2048, 4096, 100))


def test_uneven_and_two_dimensional_ranks() -> None:
    small = ModelConfig(layers=2, hidden=30, ffn_hidden=17, heads=7, kv_heads=7, head_dim=6, vocab=101)
    uneven = {gemm.name: (gemm.n, gemm.k) for gemm in gemms(small, tensor=3, expert=1, tokens=8)}
    assert uneven == {
        "attention.q": (18, 30), "attention.k, v": (18, 30), "attention.o": (30, 18), "ffn.gate, up": (6, 30),
        "ffn.down": (30, 6), "head": (34, 30),
    }  # fmt: skip
    flat = {gemm.name: (gemm.n, gemm.k) for gemm in gemms(model("llama3-8b"), tensor=8, expert=1, tokens=8, inner=2)}
    assert flat == {
        "attention.q": (1024, 2048), "attention.k, v": (256, 2048), "attention.o": (2048, 1024),
        "ffn.gate, up": (3584, 2048), "ffn.down": (2048, 3584), "head": (16032, 4096),
    }  # fmt: skip


@pytest.mark.parametrize("shares", [False, True])
def test_shapes_of_latent_attention(shares: bool) -> None:
    """DeepSeek-V3 on eight tensor ranks: down-projections are whole, and on shares of the tokens if norms are."""
    found = gemms(model("deepseek-v3"), tensor=8, expert=1, tokens=4095, shares=shares)
    own = 512 if shares else 4095
    assert [(gemm.name, gemm.rows.most, gemm.n, gemm.k) for gemm in found if gemm.name.startswith("attention")] == [
        ("attention.q_a", own, 1536, 7168),
        ("attention.q_b", 4095, 3072, 1536),
        ("attention.kv_a", own, 576, 7168),
        ("attention.kv_b", 4095, 4096, 512),
        ("attention.o", 4095, 7168, 2048),
    ]
    # As in names of vLLM's expert files: E counts the rank's experts, N is the width of gate and up.
    assert [(gemm.groups, gemm.alike * gemm.n, gemm.k) for gemm in found if gemm.groups > 1] == [
        (256, 2 * 2048 // 8, 7168),
        (256, 7168, 2048 // 8),
    ]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2]))
def test_shapes_of_all_ranks_multiply_to_the_models_flops(tensor: int, expert: int, inner: int) -> None:
    """With even divisions ranks share each product evenly; key heads and latents are not replicated here."""
    for preset in ("llama3-8b", "mixtral-8x7b"):
        config = model(preset)
        if tensor // inner * inner != tensor or (expert > 1 and config.moe is None):
            continue
        tokens = 512
        found = gemms(config, tensor=tensor, expert=expert, tokens=tokens, inner=inner)
        # The router is replicated on every tensor rank, in two dimensions along one side.
        alone = {"moe.router": inner}
        total = sum(gemm.flops * gemm.layers * alone.get(gemm.name, tensor) for gemm in found)
        assert total == pytest.approx(tokens * matmul_flops_per_token(config), rel=1e-12)
