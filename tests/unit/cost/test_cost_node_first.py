"""Tokens that cross to each node once: how many nodes they visit, against draws, and what an exchange sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partool.cost.case import Layouts
from partool.cost.traffic.node_first import NodeExchange
from partool.cost.traffic.node_visits import nodes_of_token
from partool.spec.experts import Moe

DRAWS = 4_000


def visited(moe: Moe, ranks: int, inside: int, parts: int = 1) -> float:
    return float(nodes_of_token(moe, Layouts(ep=ranks, etp=parts), inside))


def drawn(moe: Moe, nodes_of_expert: list[set[int]]) -> tuple[float, float]:
    """Return the mean number of nodes of tokens with random experts, and the standard error of this mean."""
    draw = np.random.default_rng(5)
    size = moe.experts // moe.groups
    counts = []
    for _ in range(DRAWS):
        groups = draw.permutation(moe.groups)[: moe.top_groups]
        experts = draw.permutation((groups[:, None] * size + np.arange(size)).ravel())[: moe.top_k]
        counts.append(len(set.union(*(nodes_of_expert[expert] for expert in experts))))
    return float(np.mean(counts)), float(np.std(counts)) / DRAWS**0.5


def where(experts: int, ranks: int, inside: int, parts: int = 1) -> list[set[int]]:
    """Return the nodes of the ranks with parts of each expert."""
    each = experts // ranks
    return [{(expert // each * parts + part) // inside for part in range(parts)} for expert in range(experts)]


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "form"),
    [
        (64, 8, 1, 1, (8, 2, 1)),
        (64, 6, 8, 3, (16, 4, 1)),
        (48, 4, 2, 1, (12, 2, 1)),
        (60, 5, 6, 4, (10, 2, 1)),
        (16, 3, 1, 1, (4, 2, 4)),
        (12, 2, 1, 1, (6, 4, 2)),
    ],
)
def test_visits_are_those_of_random_draws(
    experts: int, top_k: int, groups: int, top_groups: int, form: tuple[int, int, int]
) -> None:
    """Routing is free, or limited to groups that are of one node, of several nodes, or in two of them."""
    moe = Moe(experts=experts, top_k=top_k, ffn_hidden=8, groups=groups, top_groups=top_groups)
    ranks, inside, parts = form
    mean, error = drawn(moe, where(experts, ranks, inside, parts))
    assert visited(moe, ranks, inside, parts) == pytest.approx(mean, abs=4 * error + 1e-9)


@pytest.mark.parametrize(("nodes", "out", "both"), [(2, 0.25, 0.62), (4, 0.47, 0.73), (8, 0.68, 0.84)])
def test_eight_choices_cross_once_per_node(nodes: int, out: float, both: float) -> None:
    """Of the rows between nodes that one exchange of all ranks sends, with eight experts a node."""
    moe = Moe(experts=8 * nodes, top_k=8, ffn_hidden=8)
    crossing = visited(moe, 8 * nodes, 8) * (nodes - 1) / nodes
    direct = 8 * (nodes - 1) / nodes
    assert crossing / direct == pytest.approx(out, abs=0.006)
    assert (crossing + direct) / (2 * direct) == pytest.approx(both, abs=0.006)
    exchange = NodeExchange(1000, 8, 8 * nodes, nodes, 8, visited(moe, 8 * nodes, 8), 2048, 4, summed=False)
    rows_bytes = exchange._replace(weight_bytes=0).sent(1, 1, 0).between
    assert rows_bytes / (4 * 1000 * direct * 2048) == pytest.approx((out + 1) / 2, abs=0.006)


@given(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4]), st.integers(1, 8))
def test_no_token_visits_more_nodes_than_it_has_experts(nodes: int, inside: int, top_k: int) -> None:
    moe = Moe(experts=nodes * inside * 2, top_k=min(top_k, nodes * inside * 2), ffn_hidden=8)
    assert 1.0 - 1e-9 <= visited(moe, nodes * inside, inside) <= min(nodes, moe.top_k) + 1e-9


def test_sums_of_nodes_send_no_result_of_a_single_choice() -> None:
    fields: dict[str, Any] = {"visited": 1.5, "row_bytes": 100, "weight_bytes": 4}
    apart, summed = (NodeExchange(10, 4, 8, 2, 4, **fields, summed=summed).sent(1, 1, 1) for summed in (False, True))
    assert summed.between < apart.between
    assert summed.inside == apart.inside
    assert NodeExchange(0, 4, 8, 2, 4, **fields, summed=True).sent(1, 1, 0) == (0.0, 0.0)
