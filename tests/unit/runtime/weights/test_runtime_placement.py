"""Shards of parameters on tensor and data-parallel ranks: scattering and gathering changes no bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from _tensor_parts import localise, placement_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runtime_weights import CONFIG, full, pretended_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from partool.layout.tensor import Cut, Partition, chunks, own_partition
from partool.layout.tensor.cutting import cut, fused
from partool.spec.model import ModelConfig, Weights
from partool_runtime.hf import write_folder
from partool_runtime.model import Decoder
from partool_runtime.pieces import Placed, pieces, placed, split_rows
from partool_runtime.placement import Placement, full_placement
from partool_runtime.weights import build, fill, freeze, materialise, post_load


def identified(shape: tuple[int, ...]) -> torch.Tensor:
    """Return distinct values that a type conversion would change."""
    return (torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1) / 3


def parts(placement: Placement, dp_ranks: int) -> Iterator[tuple[torch.Tensor, range]]:
    """Yield a buffer per data-parallel rank for its rows of a tensor rank's part, and the rows; scalars are on one."""
    rows = placement.local_shape[0] if placement.shape else 1
    for rank in range(dp_ranks if placement.shape else 1):
        mine = split_rows(range(rows), rank, dp_ranks)
        shape = (len(mine), *placement.local_shape[1:]) if placement.shape else ()
        yield torch.full(shape, math.nan, dtype=torch.float64), mine


def assert_round_trip(placements: list[Placement], dp_ranks: int) -> None:
    """Scatter a tensor over ranks and gather it from the counted ranks: every element comes back once."""
    values = identified(placements[0].shape)
    gathered, times = torch.full_like(values, math.nan), torch.zeros_like(values)
    for placement in placements:
        for part, rows in parts(placement, dp_ranks):
            for box in placement.boxes(rows):
                place = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                part[box.local] = values[place]
                if placement.counts:
                    gathered[place] = part[box.local]
                    times[place] += 1
            assert not part.isnan().any(), "an element of the part lies in no box"
    assert torch.equal(gathered, values)
    assert (times == 1).all()


@st.composite
def cuts(draw: st.DrawFn, dim: int, size: int, ranks: int) -> Cut:
    """A partition like those of fused matrices: stretches of any length, split by chunks or shared by neighbours."""
    if draw(st.booleans()):  # neighbours hold the same rows, as with few key heads
        pairs = chunks(size, (ranks + 1) // 2)
        return cut(dim, [pairs[rank // 2] for rank in range(ranks)])
    inner = draw(st.lists(st.integers(0, size), max_size=2))
    bounds = [0, *sorted(inner), size]
    widths = [stop - start for start, stop in pairwise(bounds)]
    return fused(dim, [chunks(width, ranks) for width in widths], widths)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[Placement], int]:
    ranks, dp_ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    dims = draw(st.sets(st.sampled_from(range(len(shape))), max_size=1)) if shape else set()
    found = Partition(
        name="w", shape=shape, style="column", rule="test",
        cuts=tuple(draw(cuts(dim, shape[dim], ranks)) for dim in sorted(dims)),
    )  # fmt: skip
    return [placement_of(found, rank, ranks) for rank in range(ranks)], dp_ranks


@settings(max_examples=300, deadline=None)
@given(partitions())
def test_sharded_and_gathered_is_the_same_bits(case: tuple[list[Placement], int]) -> None:
    assert_round_trip(*case)


CONFIGS = {
    "gqa": ModelConfig(layers=1, hidden=36, ffn_hidden=22, heads=14, kv_heads=7, head_dim=5, vocab=33, qkv_bias=True),
    "few keys": ModelConfig(layers=1, hidden=12, ffn_hidden=7, heads=6, kv_heads=2, head_dim=3, vocab=31, qk_norm=True),
    "gpt": ModelConfig(
        layers=1, hidden=12, ffn_hidden=16, heads=4, kv_heads=4, head_dim=2, vocab=19, norm="layernorm",
        position="learned", max_position=9, activation="gelu", qkv_bias=True, out_bias=True, ffn_bias=True,
        tied_embeddings=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize(("ranks", "inner", "norms"), [(2, 1, False), (3, 1, True), (5, 1, False), (4, 2, False)])
def test_parts_of_the_own_decoder_are_the_whole(name: str, ranks: int, inner: int, norms: bool) -> None:
    rows = own_partition(CONFIGS[name], ranks, inner, norms)
    assert len(rows) > 5
    for row in rows:
        for dp_ranks in (1, 3):
            assert_round_trip([placement_of(row, rank, ranks) for rank in range(ranks)], dp_ranks)


def test_a_part_of_another_shape_than_its_placement_is_refused() -> None:
    placement = Placement((4, 6), (((0, 4),), ((0, 2), (4, 5))))
    assert [(p.offsets, tuple(p.tensor.shape)) for p in pieces(torch.zeros(4, 3), placement)] == [
        ((0, 0), (4, 2)),
        ((0, 4), (4, 1)),
    ]
    for shape in ((4, 6), (3, 3), (4,)):
        with pytest.raises(RuntimeError, match="placement gives"):
            pieces(torch.zeros(shape), placement)


def test_only_what_is_cut_or_does_not_count_is_placed() -> None:
    tensor = torch.zeros(4, 2)
    assert placed(tensor, None) is tensor
    assert placed(tensor, full_placement((4, 2))) is tensor
    elsewhere = Placement((4, 2), (((0, 4),), ((0, 2),)), counts=False)
    turned = Placement((4, 2), (((2, 4), (0, 2)), ((0, 2),)))  # the whole tensor, in another order
    for placement in (elsewhere, turned):
        assert placed(tensor, placement) == Placed(tensor, placement)
    assert [piece.offsets for piece in pieces(tensor, turned)] == [(2, 0), (0, 0)]


def tensor_rank(config: ModelConfig, rank: int, ranks: int, inner: int = 1) -> Decoder:
    model = build(config).double()
    localise(model, own_partition(config, ranks, inner), rank, ranks)
    return model


def assert_blocks(model: Decoder, expected: Decoder) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        for piece in pieces(parameter, model.placements[name]):
            place = tuple(slice(at, at + n) for at, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            assert torch.equal(piece.tensor, other[place]), name


@pytest.mark.parametrize("source", ["init", "dummy", "hf"])
def test_tensor_ranks_start_from_the_same_bits(source, tmp_path) -> None:
    """Cases: rows and columns, heads that do not divide, ranks that hold nothing, on top of shards by rows."""
    config = CONFIG.model_copy(update={"tied_embeddings": False})
    weights = Weights(source=source, path=str(tmp_path))
    if source == "hf":
        write_folder(full(config).state_dict(), config, tmp_path)
    expected = full(config, weights)
    for rank in range(2):
        model = tensor_rank(config, rank, 2)
        materialise(model, "cpu")
        fill(model, weights, seed=7)
        post_load(model)
        assert_blocks(model, expected)
        assert model.embed.weight.shape[0] < config.vocab
        assert model.layers[0].ffn.down.weight.shape == (33, 25)
    for rank in (0, 4, 5):
        with pretended_rank(rank, 6):
            mesh = init_device_mesh("cpu", (6,))
            model = tensor_rank(config, 1, 3)
            for group in model.groups()[:-1]:
                fully_shard(group, mesh=mesh)
            fully_shard(model, mesh=mesh)
            materialise(model, "cpu")
            fill(model, weights, seed=7)
            post_load(model)
            assert_blocks(model, expected)


def test_patterns_of_frozen_parameters_are_about_the_whole_model() -> None:
    model = tensor_rank(CONFIG, 1, 3)
    assert freeze(model, ["*.q.weight"]) == ["layers.0.attention.q.weight", "layers.1.attention.q.weight"]
    assert not model.layers[0].attention.q.weight.requires_grad
