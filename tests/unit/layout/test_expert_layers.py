"""Pyramids of experts: parameters, products and FLOPs are the sums over layers, counted by hand."""

from __future__ import annotations

import pytest

from partool.cost.training.predict import matmul_flops_per_token
from partool.layout.gemms import gemms
from partool.layout.matrices import matrix_stacks
from partool.layout.parameters import count, layer_parameters, parameters
from partool.layout.tensor import by_name, own_partition
from partool.spec.experts import ExpertShape, Moe, layer_range
from partool.spec.model import ModelConfig

MODEL = ModelConfig(
    layers=4,
    hidden=6,
    ffn_hidden=10,
    heads=2,
    kv_heads=2,
    head_dim=3,
    vocab=7,
    position="none",
    moe=Moe(
        experts=4,
        top_k=2,
        ffn_hidden=5,
        first_dense_layers=1,
        layers={"2": ExpertShape(experts=8, top_k=1), "3": ExpertShape(ffn_hidden=9)},
    ),
)
SHAPES = {1: (4, 2, 5), 2: (8, 1, 5), 3: (4, 2, 9)}
"""Experts, top_k and width of each layer."""
ATTENTION = 4 * 6 * 6


def test_parameters_and_flops_are_sums_over_layers() -> None:
    experts = {layer: 3 * number * width * 6 for layer, (number, _, width) in SHAPES.items()}
    routers = {layer: number * 6 for layer, (number, _, _) in SHAPES.items()}
    norms = (2 * 4 + 1) * 6
    dense = 2 * 7 * 6 + 4 * ATTENTION + 3 * 10 * 6
    assert count(parameters(MODEL)) == dense + norms + sum(experts.values()) + sum(routers.values())
    for layer, elements in experts.items():
        infos = layer_parameters(MODEL, layer)
        assert sum(info.elements for info in infos if info.kind == "expert") == elements
    chosen = sum(3 * top_k * width * 6 for _, top_k, width in SHAPES.values())
    assert matmul_flops_per_token(MODEL) == 2 * (dense - 7 * 6 + chosen + sum(routers.values()))


def test_every_layer_has_its_products_and_matrices() -> None:
    products = gemms(MODEL, tensor=1, expert=2, tokens=12)
    routed = {(one.n, one.groups, one.rows.mean) for one in products if one.name == "moe.experts.gate, up"}
    assert routed == {(5, 2, 12.0), (5, 4, 3.0), (9, 2, 12.0)}
    assert sum(one.layers for one in products if one.name == "moe.router") == 3
    stacks = {one.name: (one.count, one.rows, one.columns) for one in matrix_stacks(MODEL)}
    for layer, (number, _, width) in SHAPES.items():
        assert stacks[f"layers.{layer}.moe.experts.up.weight"] == (number, width, 6)


def test_tensor_ranks_cut_the_widths_of_each_layer() -> None:
    names = [info.name for info in parameters(MODEL)]
    rows = by_name(own_partition(MODEL, 2), names)
    for layer, (number, _, width) in SHAPES.items():
        row = rows[f"layers.{layer}.moe.experts.up.weight"]
        assert row.shape == (number * width, 6)
        assert [row.local_shape(rank)[0] for rank in range(2)] == [number * (width + 1) // 2, number * (width // 2)]


def test_models_of_one_shape_are_themselves() -> None:
    alike = MODEL.model_copy(update={"moe": MODEL.moe and MODEL.moe.model_copy(update={"layers": None})})
    assert alike.expert_shapes == (alike,)
    assert alike.of_layer(2) is alike
    assert [MODEL.expert_shape(layer) for layer in range(4)] == [0, 0, 1, 2]
    assert ModelConfig.model_validate_json(MODEL.model_dump_json()) == MODEL
    assert hash(ModelConfig.model_validate_json(MODEL.model_dump_json())) == hash(MODEL)


@pytest.mark.parametrize(
    ("key", "layers"),
    [("3", range(3, 4)), ("2-5", range(2, 6)), (" 2 - 5 ", range(2, 6)), ("5-2", None), ("-1", None), ("x", None)],
)
def test_keys_are_layers_or_inclusive_ranges(key: str, layers: range | None) -> None:
    assert layer_range(key) == layers
