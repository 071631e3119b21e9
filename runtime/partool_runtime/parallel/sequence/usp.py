"""USP: Ulysses within groups of neighbouring ranks, and rings between the groups (arXiv 2405.07719, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from partool.layout.sequence import Spans, bounds, joined
from partool.plan.layout import Layout
from partool_runtime.model.decoder import Block
from partool_runtime.parallel.sequence import ring
from partool_runtime.parallel.sequence.exchange import HeadExchange
from partool_runtime.parallel.sequence.types import SequenceTeam, of_teams, open_sets
from partool_runtime.parallel.sequence.ulysses import around
from partool_runtime.parallel.tensor.sharding import no_heads


def put(blocks: Sequence[Block], team: SequenceTeam, layout: Layout) -> None:
    """Make layers exchange tokens for heads in groups of ``layout.sequence.ulysses`` ranks, and keys in rings.

    The ranks that work on the same heads form a ring. A collective of all ranks of the world.
    """
    inner, outer = split(team, layout.sequence.ulysses)
    with_heads = [block for block in blocks if block.attention.core is not no_heads]
    ring.put(with_heads, outer, layout)
    for block in with_heads:
        around(block.attention, inner, block.attention.core, layout)


def split(team: SequenceTeam, inner: int) -> tuple[HeadExchange, SequenceTeam]:
    """Return the head exchange within groups of ``inner`` neighbours, and the ring over these groups."""
    groups, rings = sets(team.ranks, inner)
    group, ring_group = open_sets(team, groups), open_sets(team, rings)
    mine, place = divmod(team.rank, inner)
    sizes = [team.sizes[other] for other in groups[mine]]
    exchange = HeadExchange(group.group_name, place, tuple(_span(*span) for span in bounds(sizes)))
    outer = SequenceTeam(ring_group, mine, joined(team.shares, inner), of_teams(team, rings), team.groups)
    return exchange, outer


def sets(ranks: int, inner: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the sets of places in a team of ``ranks`` that form groups, and the sets of places that form rings."""
    places = tuple(range(ranks))
    groups = [places[first : first + inner] for first in places[::inner]]
    return groups, [places[first::inner] for first in range(inner)]


def _span(start: int, stop: int) -> Spans:
    return ((start, stop),) if stop > start else ()
