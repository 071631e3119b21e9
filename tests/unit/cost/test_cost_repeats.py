"""Prices that are computed once for rows that repeat equal those of rows that are computed alone."""

from __future__ import annotations

import numpy as np
import pytest

from partool.cost.repeats import Memo, codes, distinct


def test_equal_rows_have_equal_codes_and_others_have_not() -> None:
    columns = [np.array([1, 1, 2, 1]), np.array([0.5, 0.5, 0.5, 0.25]), True]
    code = codes(4, columns)
    assert code[0] == code[1]
    assert len(set(code.tolist())) == 3
    assert codes(1, [3, 5]) != codes(1, [5, 3])


def test_distinct_rows_are_the_first_of_their_code() -> None:
    code = np.array([7, 3, 7, 5, 3])
    first, where = distinct(code)
    assert first.tolist() == [1, 3, 0]
    assert (code[first][where] == code).all()
    assert distinct(np.zeros(0, dtype=np.int64))[0].size == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_memo_gives_what_it_was_given_and_computes_each_case_once(seed: int) -> None:
    random, memo, computed = np.random.default_rng(seed), Memo(), []
    for _ in range(20):
        values = random.integers(0, 50, size=int(random.integers(1, 40)))

        def compute(rows: np.ndarray, values: np.ndarray = values) -> list[np.ndarray | float]:
            computed.extend(values[rows].tolist())
            return [values[rows] * 2.0, 3.0]

        found = memo.results(codes(len(values), [values]), compute)
        assert found.tolist() == [(values * 2.0).tolist(), [3.0] * len(values)]
    assert len(computed) == len(set(computed))
