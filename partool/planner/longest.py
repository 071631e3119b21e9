"""The longest sequence that fits, for each sequence-parallel method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from partool.planner.forms.sequence_rules import methods
from partool.planner.problem import Problem
from partool.planner.queries import variants
from partool.planner.resolve import resolve
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build
from partool.spec.parallel import Sequence
from partool.spec.spec import Spec

NONE = "none"
"""Stands for "no sequence-parallel method": every rank holds whole sequences."""
GRAIN = 256
"""Number of tokens; only multiples of this number are tried as sequence lengths."""
_STEPS = 64
"""The search for a length stops when the remaining range is at most the length divided by this number."""
_MOST = 2**26
_FIELDS = ("ulysses", "teams", "inside", "order")


class Longest(NamedTuple):
    """The longest sequence with which a layout under a method is sure to fit."""

    method: str
    tokens: int
    """Length of the sequence; 0 if not even ``GRAIN`` tokens fit."""
    overrides: list[str]
    """Overrides of the spec that pin the method, its degree and the length."""


def longest(spec: Spec, base_dir: Path, start: int) -> Iterator[Longest]:
    """Yield the longest sequence without a method, then the longest sequence with each method.

    Lengths are doubled from ``start``, then bisected. Yields nothing for models whose tokens form a grid, because the
    grid fixes the number of tokens. The spec gives the number of ranks that share a sequence; if the spec leaves the
    number ``auto``, it is the number in the layout that needs least memory.
    """
    problem = resolve(spec, base_dir).problem
    if problem is None or problem.model.grid is not None:
        return
    pinned = problem.spec.parallel.sequence
    limit = problem.model.max_position if problem.model.position == "learned" else _MOST
    unshared = (NONE,) if pinned.degree in ("auto", 1) else ()
    shared = () if pinned.degree == 1 else methods(problem)
    for name in (*unshared, *shared):
        asked = pinned.model_copy(update={"degree": 1} if name == NONE else {"method": name})
        least = problem.with_parallel(sequence=asked)
        ranks = cache(partial(_ranks, least, several=name != NONE))
        tokens = GRAIN * _most(ranks, max(start // GRAIN, 1), limit // GRAIN)
        yield Longest(name, tokens, _overrides(asked, name, ranks(tokens // GRAIN), tokens) if tokens else [])


def _ranks(problem: Problem, count: int, *, several: bool) -> int:
    """Return the number of sequence ranks in the layout that needs least memory; 0 if the layout is not sure to fit."""
    for one in variants(problem.with_training(sequence_length=count * GRAIN)):
        space = build(one)
        mask = np.asarray(space.groups.cp > 1) if several else np.ones(space.size, dtype=bool)
        if not mask.any():
            return 0
        search = Search(one, space, mask)
        priced = search.price(*search.smallest())
        if priced.safe:
            return priced.layout.mesh.cp
    return 0


def _most(fit: Callable[[int], int], start: int, most: int) -> int:
    """Return roughly the largest number that fits, by doubling or halving ``start`` and bisecting; 0 if none fits."""
    lower = min(start, most)
    while lower and not fit(lower):
        lower //= 2
    if not lower:
        return 0
    upper = 2 * lower
    while upper <= most and fit(upper):
        lower, upper = upper, 2 * upper
    upper = min(upper, most + 1)
    while upper - lower > max(1, lower // _STEPS):
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if fit(middle) else (lower, middle)
    return lower


def _overrides(asked: Sequence, method: str, degree: int, tokens: int) -> list[str]:
    """Return the overrides that pin a method, its degree and a length."""
    given = {name: getattr(asked, name) for name in _FIELDS if getattr(asked, name) != "auto"}
    fields = {"degree": degree} if method == NONE else {"method": method, "degree": degree, **given}
    written = ", ".join(f"{name}: {value}" for name, value in fields.items())
    return [f"parallel.sequence={{{written}}}", f"training.sequence_length={tokens}"]
