"""Which ranks of a plan are executed to find disagreements among all of them."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import cast

from partool.layout.mesh import coordinates, rank_of
from partool.layout.sequence import tokens
from partool.layout.startrail import Trails
from partool.plan.layout import Mesh, SequenceLayout
from partool.plan.types import Plan
from partool.strategies.sequence import METHODS

ALL_UP_TO = 8
"""Worlds of at most this many ranks are executed whole, and so are rings."""


def differing_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the global ranks to execute, ascending.

    Ranks run the same program on sizes that follow from their coordinates. Pipeline positions hold different layers and
    have different action lists, so every position is executed. Along the other axes ranks differ only by their share:
    the first place of an axis has the largest share of rows, heads or columns, the last place the smallest one, as in
    ``torch.chunk``. So from the first place of all axes one axis at a time is varied (a star), and each of these
    coordinates is combined with every pipeline position, so that both ends of the messages between stages are executed:

    * tensor ranks: the last place; with two dimensions, the last place of each and of both; the first place of each
      combination of sizes in the plan's partition; those that share heads with the first or the last place;
    * ranks that share sequences: the last place, the places with most and fewest tokens, and the first rank's peers; at
      the first pipeline position all of up to 8 ranks that send each other keys, as each has messages of its own;
    * data-parallel ranks: the last replica and the last shard; the last rank of the shards' axis, which contains the
      ranks that share sequences, has the smallest shard of parameters;
    * ranks that share experts: the last of the first rank's group, and the last rank that has the same experts.

    So each group has at least two executed ranks, except groups that contain only ranks away from the star.
    A world of at most 8 ranks is executed whole.
    """
    mesh = plan.layout.mesh
    if mesh.world_size <= ALL_UP_TO:
        return tuple(range(mesh.world_size))
    ranks = {rank_of((stage, *position), mesh) for stage, position in product(range(mesh.pp), _star(plan, mesh))}
    if METHODS[plan.layout.sequence.method].keys != "own" and mesh.cp <= ALL_UP_TO:
        ranks |= {rank_of((0, 0, 0, place, 0), mesh) for place in range(mesh.cp)}
    return tuple(sorted(ranks))


def _star(plan: Plan, mesh: Mesh) -> set[tuple[int, int, int, int]]:
    """Return the coordinates of the executed ranks on the axes inside of the pipeline's."""
    last_copy, last_shard = mesh.dp_replicate - 1, mesh.dp_shard - 1
    star = {(0, 0, 0, 0), (last_copy, 0, 0, 0), (0, last_shard, 0, 0), (0, last_shard, mesh.cp - 1, 0)}
    star |= {(0, 0, 0, place) for place in _tensor_places(plan, mesh.tp)}
    star |= {(0, *position) for position in _expert_places(plan, mesh)}
    return star | {(0, 0, place, 0) for place in _sharers(plan)}


def _expert_places(plan: Plan, mesh: Mesh) -> set[tuple[int, int, int]]:
    """Return the executed places, on the axes inside of a copy of the state, among the ranks that share experts."""
    expert = plan.layout.expert_ranks
    if expert == 1:
        return set()
    sizes = (mesh.dp_shard, mesh.cp, mesh.tp)
    last = prod(sizes) - 1
    return {cast("tuple[int, int, int]", coordinates(rank, sizes)) for rank in (expert - 1, last + 1 - expert, last)}


def _tensor_places(plan: Plan, ranks: int) -> set[int]:
    """Return the executed places among the tensor ranks."""
    inner = plan.layout.tensor.inner
    places = {inner - 1, ranks - inner, ranks - 1}
    first: dict[tuple[int, ...], int] = {}
    for place in range(ranks):
        sizes = [stop - start for row in plan.partition for spans in row.spans(place) for start, stop in spans]
        first.setdefault(tuple(sizes), place)
    for row in plan.partition:
        for place in (0, ranks - 1):
            holders = row.holders(place, ranks)
            places.update(holders if row.gradients == "summed" and len(holders) < ranks else ())
    return places.union(first.values())


def _sharers(plan: Plan) -> set[int]:
    """Return the executed places among the ranks that share sequences."""
    layout, sizes = plan.layout.sequence, [tokens(spans) for spans in plan.shares]
    places = {0, layout.degree - 1, sizes.index(max(sizes)), sizes.index(min(sizes))}
    return places | {place for place in _peers(layout) if place < layout.degree}


def _peers(layout: SequenceLayout) -> set[int]:
    """Return places with which place 0 exchanges messages: its neighbours, and the others of its ring and its team."""
    record = METHODS[layout.method]
    if record.keys == "own" or layout.degree == 1:
        return set()
    if record.heads == "groups":  # ranks of one place in neighbouring groups form a ring
        return {1, layout.ulysses - 1, layout.ulysses, layout.degree - layout.ulysses}
    if record.keys == "teams":
        trails = Trails(layout.degree, layout.teams, layout.inside)
        ring = trails.ring(0)
        return {1, ring[1 % len(ring)], ring[-1], *trails.team(0)}
    return {1}
