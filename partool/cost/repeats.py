"""Computes rows that repeat only once: a memo holds columns of results by case, and cases are told apart by a code.

Long columns of layouts repeat few cases, as most equations read few of a layout's columns. The columns that an equation
reads are the case; everything else that it reads has to be the same for all rows of one memo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import Column, Mask

_FACTOR = 0x9E3779B97F4A7C15
"""The golden ratio times 2^64, which spreads small integers over all bits (Knuth, TAOCP 3, section 6.4)."""


def codes(rows: int, columns: Iterable[Column | Mask]) -> NDArray[np.int64]:
    """Return a code of each row's values, equal for rows with equal values.

    Products wrap around; a collision among a few thousand cases has a probability of about 1e-12.
    """
    code = np.zeros(rows, dtype=np.int64)
    for factor, column in enumerate(columns, 3):
        values = np.asarray(column)
        values = values.astype(np.float64).view(np.int64) if values.dtype.kind == "f" else values.astype(np.int64)
        code += values
        code *= np.int64(_FACTOR // factor | 1)
    return code


def distinct(code: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the index of the first row of each code, by ascending code, and the place of each row among these.

    ``numpy.unique`` is not used, as it would import masked arrays.
    """
    order = np.argsort(code, kind="stable")
    ordered = code[order]
    starts = np.ones(len(code), dtype=bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    where = np.empty(len(code), dtype=np.intp)
    where[order] = np.cumsum(starts) - 1
    return order[starts], where


class Memo:
    """Columns of results by case, for the rows of many calls."""

    def __init__(self) -> None:
        self._codes = np.zeros(0, dtype=np.int64)
        """Codes of the known cases, in ascending order."""
        self._places = np.zeros(0, dtype=np.intp)
        """Place of each known case in the results."""
        self._results = np.zeros((0, 0))
        """The results [columns, cases], with room for further cases."""

    def results(
        self,
        code: NDArray[np.int64],
        compute: Callable[[NDArray[np.intp]], Sequence[Column]],
        which: slice = slice(None),
    ) -> NDArray[np.float64]:
        """Return the results [columns, rows] of rows with these codes; ``which`` chooses among the columns.

        ``compute`` returns the columns of results for the rows with the indices that it is given, one row per new case.
        """
        # Each case is looked up once, in ascending order: known codes may take more than the processor's cache.
        first, where = distinct(code)
        self._learn(code, first, compute)
        at, _ = self._find(code[first])
        columns: NDArray[np.float64] = np.take(self._results[which], self._places[at][where], axis=1)
        return columns

    def learn(self, code: NDArray[np.int64], compute: Callable[[NDArray[np.intp]], Sequence[Column]]) -> None:
        """Compute the results of rows whose codes are not known yet, all at once."""
        self._learn(code, distinct(code)[0], compute)

    def _learn(
        self,
        code: NDArray[np.int64],
        first: NDArray[np.intp],
        compute: Callable[[NDArray[np.intp]], Sequence[Column]],
    ) -> None:
        """Compute those of the rows ``first``, one of each case, that are not known yet."""
        _, learned = self._find(code[first])
        if not learned.all():
            new = first[~learned]
            self._add(code[new], compute(new))

    def _find(self, code: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return the index of each code among the known ones, and a mask of the codes that are known."""
        if not len(self._codes):
            return np.zeros(len(code), dtype=np.intp), np.zeros(len(code), dtype=bool)
        at = np.minimum(np.searchsorted(self._codes, code), len(self._codes) - 1)
        return at, self._codes[at] == code

    def _add(self, code: NDArray[np.int64], columns: Sequence[Any]) -> None:
        start, stop = len(self._codes), len(self._codes) + len(code)
        if stop > self._results.shape[1]:
            wider = np.empty((len(columns), 2 * stop))
            if start:
                wider[:, :start] = self._results[:, :start]
            self._results = wider
        for at, column in enumerate(columns):
            self._results[at, start:stop] = column
        every = np.concatenate([self._codes, code])
        order = np.argsort(every, kind="stable")
        self._codes, self._places = every[order], np.concatenate([self._places, np.arange(start, stop)])[order]
