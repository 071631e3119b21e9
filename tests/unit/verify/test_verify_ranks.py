"""Which ranks of a plan are executed to find disagreements among all of them."""

from __future__ import annotations

from functools import cache

import pytest
from often import often
from planned import plan_of

from partool.layout.mesh import AXES, coordinates, group_of
from partool.layout.sequence import tokens
from partool.layout.startrail import Trails
from partool.plan.types import Plan
from partool.verify import differing_ranks

SPEC = """\
model: {hidden: 256, layers: 16, heads: 16, kv_heads: %d, vocab: 512, ffn_hidden: 512}
hardware: {accelerator: h100-sxm, nodes: %d}
data: python-stdlib
training: {global_batch: 1024, sequence_length: 4093}
parallel: {%s}
"""
LAYOUTS = {
    "all axes": (8, 128, "tensor: 4, sequence: {degree: 4, method: ring}, pipeline: {stages: 8}, data: {zero: 2}"),
    "replicas of shards": (8, 16, "tensor: 2, sequence: 1, pipeline: 1, data: {zero: 3, shard: 8}"),
    "startrail": (8, 4, "tensor: 1, sequence: {degree: 16, method: startrail, teams: 2}, pipeline: 1, data: {zero: 1}"),
    "usp": (8, 4, "tensor: 1, sequence: {degree: 16, method: usp, ulysses: 4}, pipeline: 2"),
    "two dimensions": (8, 4, "tensor: {shape: [4, 2]}, sequence: 1, pipeline: 4"),
    "few key heads": (4, 2, "tensor: 8, sequence: 1, pipeline: 2"),
}
OFTEN = ("all axes", "startrail", "two dimensions")
"""Layouts that run each time."""


@cache
def case(name: str) -> tuple[Plan, tuple[int, ...]]:
    """Return a plan and its executed ranks."""
    plan = plan_of(SPEC % LAYOUTS[name])
    return plan, differing_ranks(plan)


@pytest.mark.parametrize("name", often(LAYOUTS, OFTEN))
def test_each_axis_has_two_executed_ranks_at_every_pipeline_position(name: str) -> None:
    plan, ranks = case(name)
    mesh = plan.layout.mesh
    assert list(ranks) == sorted(set(ranks))
    assert mesh.world_size > 8
    assert {coordinates(rank, mesh)[0] for rank in ranks} == set(range(mesh.pp))
    inside = {coordinates(rank, mesh)[1:] for rank in ranks}
    later = {coordinates(rank, mesh)[1:] for rank in ranks if coordinates(rank, mesh)[0] == mesh.pp - 1}
    assert all(
        (stage, *each) in {coordinates(rank, mesh) for rank in ranks} for each in later for stage in range(mesh.pp)
    )
    assert len(later) <= len(inside) <= 10
    for axis in AXES:
        group = group_of(0, axis, mesh)
        assert {group[0], group[-1]} <= set(ranks)


@pytest.mark.parametrize("name", often(LAYOUTS, OFTEN))
def test_the_largest_and_the_smallest_shares_are_executed(name: str) -> None:
    plan, ranks = case(name)
    mesh = plan.layout.mesh
    places = [coordinates(rank, mesh) for rank in ranks]
    shards = {(place[2] * mesh.cp + place[3]) for place in places}
    assert {0, mesh.dp_shard * mesh.cp - 1} <= shards
    sizes = [tokens(spans) for spans in plan.shares]
    assert {min(sizes), max(sizes)} <= {sizes[place[3]] for place in places}
    for row in plan.partition:
        held = {rank: row.spans(rank) for rank in range(mesh.tp)}
        executed = {_size(held[place[4]]) for place in places}
        assert executed == {_size(spans) for spans in held.values()}, row.name


def _size(spans: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in dim) for dim in spans)


def test_peers_of_the_first_rank_are_executed() -> None:
    """Otherwise its messages and sums of gradients would not be compared with any other rank's."""
    plan, ranks = case("startrail")
    trails = Trails(16, plan.layout.sequence.teams, plan.layout.sequence.inside)
    assert {*trails.team(0), trails.ring(0)[1]} <= set(ranks)
    assert {1, 4, 12} <= set(case("usp")[1])
    plan, ranks = case("few key heads")
    shared = {row.holders(0, 8) for row in plan.partition if row.gradients == "summed"}
    assert any(1 < len(holders) < 8 for holders in shared)
    ends = [holders for holders in shared if {0, 7} & set(holders)]
    assert len(ends) > 1
    assert all(set(holders) <= set(ranks) for holders in ends if len(holders) < 8)
    plan, ranks = case("two dimensions")
    assert {1, 6, 7} <= set(ranks)


def test_a_ring_is_executed_whole_once() -> None:
    plan, ranks = case("all axes")
    mesh = plan.layout.mesh
    for stage, places in ((0, {0, 1, 2, 3}), (7, {0, 1, 3})):
        assert {coordinates(rank, mesh)[3] for rank in ranks if coordinates(rank, mesh)[0] == stage} == places


@pytest.mark.parametrize(
    ("expert", "axes"), [(4, "tensor: 2, sequence: 1, pipeline: 2"), (16, "tensor: 4, sequence: 2, pipeline: 1")]
)
def test_groups_of_ranks_that_share_experts_have_two_executed_ranks(expert: int, axes: str) -> None:
    spec = SPEC.replace("ffn_hidden: 512", "ffn_hidden: 512, moe: {experts: 16, top_k: 2, ffn_hidden: 64}")
    plan = plan_of(spec % (8, 4, f"{axes}, expert: {expert}, data: {{zero: 1, shard: {32 // expert}}}"))
    ranks, mesh = differing_ranks(plan), plan.layout.mesh
    assert mesh.dp_replicate * mesh.dp_shard > 1
    stage = mesh.world_size // mesh.pp
    for first in range(0, mesh.world_size, stage):
        here = {rank - first for rank in ranks if first <= rank < first + stage}
        assert {0, expert - 1} <= here
        copy = mesh.dp_shard * mesh.cp * mesh.tp
        assert {0, copy - expert} <= here


def test_a_small_world_is_executed_whole() -> None:
    plan = plan_of(SPEC % (8, 1, "tensor: 2, sequence: 1, pipeline: 2"))
    assert differing_ranks(plan) == tuple(range(8))


def test_a_thousand_devices_need_few_ranks() -> None:
    plan, ranks = case("all axes")
    assert plan.layout.mesh.world_size == 1024
    assert len(ranks) <= 64
