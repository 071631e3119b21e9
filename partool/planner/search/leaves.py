"""Layouts that a search has priced, and its result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.planner.search.price import Priced

CROWDED = 1.5
"""Factor on the memory limit: settings that save memory do not make layouts fit that exceed it by more."""


@dataclass
class Leaves:
    """Layouts that fit according to the closed equations, with prices; each field has one entry per layout."""

    group: NDArray[np.int64]
    policy: NDArray[np.int64]
    bound_s: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    probability: NDArray[np.float64]
    host_bytes: NDArray[np.float64]

    @classmethod
    def join(cls, parts: list[Leaves]) -> Leaves:
        """Return the leaves of all parts, concatenated."""
        names = ("group", "policy", "bound_s", "memory_bytes", "probability", "host_bytes")
        if not parts:
            return cls(*(np.zeros(0, dtype=int if name in ("group", "policy") else float) for name in names))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def __len__(self) -> int:
        return len(self.group)


def crowded(results: Iterable[SearchResult], limit_s: float) -> tuple[Any, Any]:
    """Return groups and policies of layouts with bounds up to ``limit_s`` that exceed the memory by little."""
    parts = [np.concatenate(part) for part in zip(*(one for each in results for one in each.crowded), strict=True)]
    near = parts[2] <= limit_s if parts else slice(0)
    return (parts[0][near], parts[1][near]) if parts else (np.zeros(0, dtype=int),) * 2


@dataclass
class SearchResult:
    """The result of a search."""

    best: Priced | None
    """The layout with the least score that is predicted to fit; None if there is none."""
    leaves: Leaves = field(default_factory=lambda: Leaves.join([]))
    too_large: int = 0
    """Number of layouts in groups whose bound of memory is too large even with everything recomputed and offloaded."""
    crowded: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """Groups and policies of layouts that exceed the memory by less than :data:`CROWDED`, and their bounds."""
    complete: bool = True
    """False if the search ended at its limit of rows: layouts that the search did not reach may be faster."""
