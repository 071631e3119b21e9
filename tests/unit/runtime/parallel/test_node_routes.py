"""Numbers of rows that a dry run supposes where tokens cross to each node once: ranks agree, and rows hold choices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partool_runtime.parallel.expert.node_routes import NodeTeam, Numbers


def supposed(team: NodeTeam, choices: int, experts: int) -> Numbers:
    sequences = 3
    return team.numbers(torch.zeros(0), sequences * team.tokens[team.place] * choices, experts, choices)


def balanced(totals: torch.Tensor, numbers: Callable[[], list[int]]) -> list[int]:
    return numbers()


@given(st.integers(2, 3), st.integers(2, 3), st.integers(1, 5), st.lists(st.integers(1, 9), min_size=9, max_size=9))
def test_ranks_suppose_the_same_rows(nodes: int, inside: int, choices: int, tokens: list[int]) -> None:
    ranks = nodes * inside
    teams = [NodeTeam("rail", "node", at, inside, tuple(tokens[:ranks]), balanced) for at in range(ranks)]
    numbers = [supposed(team, choices, 2 * ranks) for team in teams]
    for at, mine in enumerate(numbers):
        node, place = divmod(at, inside)
        rail, of_node = range(place, ranks, inside), range(node * inside, (node + 1) * inside)
        for way, others, here in (("crossing", rail, node), ("returning", rail, node), ("spreading", of_node, place)):
            received, sent = getattr(mine, way).received, [getattr(numbers[other], way).sent[here] for other in others]
            assert received == sent, way
        # Rows that have arrived hold all choices that spread, and these return to where they came from.
        arrived, spreading = sum(mine.crossing.received), sum(mine.spreading.sent)
        assert arrived <= spreading <= arrived * choices
        assert spreading == sum(mine.returning.sent)
        assert sum(mine.returning.received) == 3 * tokens[at] * choices


def test_the_share_of_tokens_that_cross_is_that_of_random_choices() -> None:
    team = NodeTeam("rail", "node", 0, 2, (280,) * 4, balanced)
    mine = team.numbers(torch.zeros(0), 280 * 2, 8, 2)
    assert mine.crossing.sent == pytest.approx([220, 220])
