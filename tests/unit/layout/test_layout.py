"""Meshes, shards and lists of parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partool.layout.mesh import AXES, coordinates, group_of, rank_of, shard_rows
from partool.layout.parameters import count, groups, is_frozen, parameters
from partool.spec.model import ModelConfig

sizes = st.lists(st.integers(1, 4), min_size=len(AXES), max_size=len(AXES))


@given(sizes, st.data())
def test_coordinates_and_ranks_are_inverse(shape: list[int], data: st.DataObject) -> None:
    world = 1
    for size in shape:
        world *= size
    rank = data.draw(st.integers(0, world - 1))
    assert rank_of(coordinates(rank, shape), shape) == rank
    for axis, size in zip(AXES, shape, strict=True):
        group = group_of(rank, axis, shape)
        assert rank in group
        assert len(set(group)) == size
        assert all(group_of(member, axis, shape) == group for member in group)


def test_last_axis_varies_fastest_and_bounds_are_checked() -> None:
    shape = (1, 2, 3, 1, 2)
    assert coordinates(1, shape) == (0, 0, 0, 0, 1)
    assert group_of(0, "dp_shard", shape) == (0, 2, 4)
    with pytest.raises(ValueError, match="outside a mesh of 12"):
        coordinates(12, shape)
    with pytest.raises(ValueError, match="outside an axis"):
        rank_of((0, 0, 3, 0, 0), shape)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shards_cover_every_row_once(rows: int, ranks: int) -> None:
    held = [shard_rows(rows, ranks, rank) for rank in range(ranks)]
    assert [row for part in held for row in range(part.start, part.stop)] == list(range(rows))
    assert held[0].stop - held[0].start == -(-rows // ranks)


def test_groups_hold_every_parameter_once_and_patterns_match_names() -> None:
    config = ModelConfig(
        layers=2, hidden=8, ffn_hidden=12, heads=2, kv_heads=1, head_dim=4, vocab=9, position="learned", qkv_bias=True
    )
    listed = parameters(config)
    grouped = [info for group in groups(config) for info in group]
    assert sorted(info.name for info in grouped) == sorted(info.name for info in listed)
    assert count(grouped) == count(listed)
    decayed = {info.name for info in listed if info.decay}
    assert "layers.0.attention.q.weight" in decayed
    assert "layers.0.attention.q.bias" not in decayed
    assert "final_norm.weight" not in decayed
    assert [info.name for info in listed if is_frozen(info.name, ("layers.1.ffn.*",))] == [
        "layers.1.ffn.gate.weight", "layers.1.ffn.up.weight", "layers.1.ffn.down.weight",
    ]  # fmt: skip
