"""Experts of rows: counts in names and notes, and models that are not read as dense."""

from __future__ import annotations

from typing import Any

import pytest

from partool.replay.cells import Cells
from partool.replay.experts import experts_of
from partool.replay.models import model_of

SIZES = {"n_layers": "24", "hidden": "2048", "n_heads": "16", "n_kv_heads": "4", "ffn_hidden": "7168"}


def cells(**changes: str) -> Cells:
    return Cells({"source": "test", "seq_len": "4096", **changes})


@pytest.mark.parametrize(
    ("model", "notes", "counts"),
    [
        ("Custom-8x7B", "", (8, 2, 0, 1)), ("My 8×22B", "", (8, 2, 0, 1)), ("MoE 64e top-8", "", (64, 8, 0, 1)),
        ("Llama MoE, 128 experts", "", (128, 8, 0, 1)), ("4B MoE", "8 experts, top-2; 1.8B active", (8, 2, 0, 1)),
        ("MoE", "64 routed experts, 6 active experts, 2 shared experts", (64, 6, 2, 1)),
        ("MoE 7B", "2 of 16 experts per token", (16, 2, 0, 1)), ("MoE", "num_experts=32 top_k=4", (32, 4, 0, 1)),
        ("MoE-16 experts", "top-1, experts in every 2nd layer, shared expert", (16, 1, 1, 2)),
        ("MoE 8E", "experts in every other layer", (8, 2, 0, 2)), ("small_moe", "E32 k=2", (32, 2, 0, 1)),
    ],
)  # fmt: skip
def test_counts_in_words(model: str, notes: str, counts: tuple[int, ...]) -> None:
    found = experts_of(cells(model=model, notes=notes))
    assert found is not None
    assert tuple(found[name] for name in ("experts", "top_k", "shared_experts", "every")) == counts


@pytest.mark.parametrize(
    ("model", "notes"),
    [
        ("Llama-3-8B", "slower than the MoE of 8 experts"),
        ("GPT 7B", "no experts"),
        ("MoE 4B", "sizes not stated"),
        ("MoE", "2 shared experts"),
        ("Llama-3-8B", "top-2 of our runs"),
    ],
)
def test_no_counts(model: str, notes: str) -> None:
    assert experts_of(cells(model=model, notes=notes)) is None


def moe_of(**changes: str) -> Any:
    model = model_of(cells(**changes))
    assert model is not None
    return model


def test_rows_of_experts_are_not_dense() -> None:
    named = moe_of(model="MoE 4B (8 experts, top-2)", **SIZES)
    assert (named.moe.experts, named.moe.top_k, named.moe.ffn_hidden, named.activation) == (8, 2, 7168, "swiglu")
    told = moe_of(model="7B", ep="2", notes="8 experts, top-2", **SIZES)
    assert told.moe.experts == 8
    upcycled = moe_of(model="Llama-3-8B MoE 4 experts top-1")
    assert (upcycled.layers, upcycled.moe.experts, upcycled.moe.ffn_hidden) == (32, 4, 14336)


def test_experts_whose_number_is_unknown_are_no_dense_model() -> None:
    assert model_of(cells(model="MoE 4B", **SIZES)) is None
    assert model_of(cells(model="7B", ep="2", params_b="7")) is None
    assert model_of(cells(model="Secret-60B-A4B", **SIZES)) is None


def test_published_models_keep_their_experts() -> None:
    assert moe_of(model="Mixtral-8x7B", notes="128 experts").moe.experts == 8
    assert moe_of(model="Qwen3-30B-A3B").moe.experts == 128
    assert moe_of(model="Llama-3-8B", notes="MoE of 8 experts is slower").moe is None
