"""To how many nodes a token's experts belong, where an exchange sends it to each node once."""

from __future__ import annotations

from functools import lru_cache
from math import comb

import numpy as np

from partool.cost.case import Column, Layouts
from partool.spec.experts import Moe


def nodes_of_token(moe: Moe, layouts: Layouts, inside: int) -> Column:
    """Return the expected number of nodes with an expert of a token, on nodes of ``inside`` expert ranks each.

    The experts are drawn at random without replacement; with limited routing first the groups, each set of which is as
    likely as any other, then the experts of these groups.
    """
    experts, parts = np.broadcast_arrays(np.asarray(layouts.ep, dtype=int), np.asarray(layouts.etp, dtype=int))
    values = [_visited(_draw(moe), each, part, inside) for each, part in zip(experts.flat, parts.flat, strict=True)]
    visited: Column = np.reshape(np.array(values), experts.shape)
    return visited


Draw = tuple[int, int, int, int]
"""Numbers of experts, of a token's experts, of groups, and of a token's groups."""


def _draw(moe: Moe) -> Draw:
    return moe.experts, moe.top_k, moe.groups, moe.top_groups


@lru_cache(maxsize=1024)
def _visited(draw: Draw, ranks: int, parts: int, inside: int) -> float:
    """Return the expected number of nodes; experts are divided among ``ranks``, each cut in ``parts``."""
    experts = draw[0]
    each, nodes = experts // ranks, ranks * parts // inside
    if nodes <= 1 or ranks <= 1:
        return 1.0
    visited = 0.0
    for node in range(nodes):
        # Neighbouring ranks hold the parts of the same experts, which may be in two nodes.
        start, stop = node * inside // parts * each, -(-(node + 1) * inside // parts) * each
        visited += 1.0 - _missed(draw, start, stop)
    return visited


def _missed(draw: Draw, start: int, stop: int) -> float:
    """Return the probability that a token has none of the experts from ``start`` to before ``stop``."""
    experts, chosen, groups, taken = draw
    size = experts // groups
    # Ways to take groups, by their number and by how many of the node's experts these groups have.
    ways: dict[tuple[int, int], int] = {(0, 0): 1}
    for group in range(groups):
        inside = max(0, min(stop, (group + 1) * size) - max(start, group * size))
        for (number, among), count in list(ways.items()):
            if number < taken:
                key = number + 1, among + inside
                ways[key] = ways.get(key, 0) + count
    drawn = comb(groups, taken) * comb(taken * size, chosen)
    missing = sum(
        count * comb(taken * size - among, chosen) for (number, among), count in ways.items() if number == taken
    )
    return missing / drawn
