"""Rows hold whole documents: none is cut at a row's end, none is lost, and few tokens of a row are empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from partool.plan.packing import Arrangement, Lengths, PackedRows, arrange


def arranged(
    tokens: list[int], first: list[int] | None = None, last: list[int] | None = None, **how: Any
) -> Arrangement:
    lengths = Lengths.of_text(np.array(tokens, dtype=np.int64))
    if first is not None and last is not None:
        lengths = Lengths(lengths.tokens, np.array(first, dtype=np.int64), np.array(last, dtype=np.int64))
    settings: dict[str, Any] = {"truncate": "right", "pack": True, "validation": 0.0, **how}
    return arrange(lengths, 9, **settings)


def rows_of(rows: PackedRows) -> list[list[int]]:
    return [rows.documents[start:stop].tolist() for start, stop in zip(rows.starts[:-1], rows.starts[1:], strict=True)]


def test_the_fullest_row_with_room_takes_the_next_longest_document() -> None:
    # Ten tokens a row: 7 and 6 open rows; 4 fits the second alone (6 + 4), 3 the first, 2 opens a third.
    assert rows_of(arranged([2, 4, 7, 3, 6]).train) == [[2, 3], [4, 1], [0]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pack", [True, False])
def test_every_document_is_in_one_row_whole(seed: int, pack: bool) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 14, size=301)
    result = arranged(tokens.tolist(), pack=pack, validation=0.1)
    rows = [*rows_of(result.train), *rows_of(result.validation)]
    assert sorted(document for row in rows for document in row) == np.flatnonzero(tokens > 1).tolist()
    sums = [int(result.kept[row].sum()) for row in rows]
    assert max(sums) <= 10
    assert (result.kept == np.where(tokens > 1, np.minimum(tokens, 10), 0)).all()
    assert result.truncated == (tokens > 10).sum()
    assert result.validation.documents.tolist() == sorted(result.validation.documents.tolist()) or pack
    assert len(result.validation.documents) == (tokens > 1).sum() // 10
    if pack:
        # Two rows that both have room for a document of the other would be a failure of best fit.
        assert sum(sums) / (10 * len(rows)) > 0.9


@pytest.mark.parametrize(
    ("truncate", "begins", "kept"),
    [
        ("right", [0, 0, 0, 0, 0, 0], [6, 10, 0, 10, 10, 0]),
        ("left", [0, 4, 4, 4, 4, 0], [6, 10, 10, 0, 10, 0]),
        ("drop", [0, 0, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]),
    ],
)
def test_a_long_sample_stays_only_with_a_token_to_train_on(truncate: Any, begins: list[int], kept: list[int]) -> None:
    # Trained on: all, the middle, only the end, only the beginning, both ends, nothing.
    first, last = [1, 5, 11, 1, 1, -1], [5, 9, 13, 3, 13, -1]
    result = arranged([6, 14, 14, 14, 14, 8], first, last, truncate=truncate)
    assert result.begins.tolist() == begins
    assert result.kept.tolist() == kept
    assert result.dropped == (4 if truncate == "drop" else 0)
    assert result.untrained == (1 if truncate == "drop" else 2)
    assert result.truncated == sum(size == 10 for size in kept)


def test_no_document_is_no_row() -> None:
    empty = arranged([], validation=0.5)
    assert (empty.train.count, empty.validation.count) == (0, 0)
    assert rows_of(arranged([1, 1]).train) == []


@pytest.mark.parametrize("pack", [True, False])
def test_the_answers_of_a_pair_stay_side_by_side(pack: bool) -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(2, 13, size=402)
    result = arranged(tokens.tolist(), pack=pack, validation=0.1, pairs=True)
    rows = [*rows_of(result.train), *rows_of(result.validation)]
    for row in rows:
        assert [each + 1 for each in row[::2]] == row[1::2]
        assert all(each % 2 == 0 for each in row[::2])
        assert 0 < result.kept[row].sum() <= 10
    assert sorted(document for row in rows for document in row) == list(range(402))
    assert result.validation.count > 0
    assert result.truncated == (tokens.reshape(-1, 2).sum(1) > 10).sum()


@pytest.mark.parametrize(
    ("truncate", "kept", "begins"),
    [
        ("right", [3, 7, 5, 5, 4, 6, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]),
        ("left", [3, 7, 5, 5, 4, 6, 0, 0], [0, 5, 2, 3, 0, 0, 0, 0]),
        ("drop", [0, 0, 0, 0, 4, 6, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_long_pair_shares_a_row_or_is_left_out(truncate: Any, kept: list[int], begins: list[int]) -> None:
    # The last pair has an answer without a token to train on.
    first, last = [1, 1, 1, 1, 1, 1, 1, -1], [2, 11, 6, 7, 3, 5, 2, -1]
    result = arranged([3, 12, 7, 8, 4, 6, 3, 3], first, last, truncate=truncate, pairs=True)
    assert result.kept.tolist() == kept
    assert result.begins.tolist() == begins
    assert (result.dropped, result.untrained, result.samples) == (2 if truncate == "drop" else 0, 1, 4)
    with pytest.raises(ValueError, match="not pairs"):
        arranged([3, 4, 5], pairs=True)
