"""Regions of repeated passes in the lists of pipeline ranks."""

from __future__ import annotations

import pytest

from partool.schedule import generate
from partool_runtime.dry.regions import LEAST, Token, paired, regions_of, repeated, tokens_of


def short(name: str, chunks: int, rank: int, whole: int) -> int:
    """Return the least number of micro-batches whose list stands for a list of ``whole``; check the pairing."""
    lead, tokens = tokens_of(generate(name, 4, whole, chunks), rank)
    for count in range(LEAST, whole):
        if name == "interleaved" and count % 4:
            continue
        few_lead, few = tokens_of(generate(name, 4, count, chunks), rank)
        pairing = paired(few, tokens) if few_lead == lead else None
        if pairing is not None:
            assert [few[at][:2] for at in pairing.templates] == [token[:2] for token in tokens]
            assert all(few[one][:2] == few[other][:2] for one, other in pairing.compared)
            return count
    return whole


@pytest.mark.parametrize(
    ("name", "chunks", "most"),
    [("gpipe", 1, 6), ("1f1b", 1, 8), ("interleaved", 2, 24), ("zb-h1", 1, 8), ("zb-v", 2, 12), ("hanayo", 2, 14)],
)
def test_few_micro_batches_stand_for_many(name: str, chunks: int, most: int) -> None:
    assert all(LEAST <= short(name, chunks, rank, 32) <= most for rank in range(4))


def test_additional_repetitions_are_those_of_the_last_but_one() -> None:
    assert repeated(4, 7) == [0, 1, 2, 2, 2, 2, 3]
    tokens = [Token("F", 0, batch, ()) for batch in range(6)]
    assert [(each.width, each.times) for each in regions_of(tokens)] == [(1, 6)]
    pairing = paired(tokens[:4], tokens)
    assert pairing is not None
    assert pairing.templates == [0, 1, 2, 2, 2, 3]
    assert pairing.compared == [(1, 2)]
    assert paired(tokens[:3], tokens) is None, "too few repetitions to compare"
    backward = [Token("B", 0, batch, ()) for batch in range(6)]
    assert paired([*tokens[:4], *backward[:4]], [*backward, *tokens]) is None
