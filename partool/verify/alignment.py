"""Where two lists first differ, and whether one of them lacks entries there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_COMPARED = 16
"""Entries after a gap that must agree."""
_LONGEST = 64
"""Most entries that a gap may have if the rest of the lists differs, too."""


class Divergence(NamedTuple):
    """First difference of two lists."""

    at: int
    """Index of the difference."""
    missing: int
    """Entries that the second list lacks; negative: that the first list lacks; 0: the entries at ``at`` differ."""


def divergence(a: Sequence[object], b: Sequence[object]) -> Divergence | None:
    """Return where two lists first differ; None if they are equal.

    A list lacks entries where it agrees with the other one once these are removed. If the whole rest agrees in no way,
    the next 16 entries decide.
    """
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if at == len(b):
        return Divergence(at, len(a) - at)
    if at == len(a):
        return Divergence(at, at - len(b))
    longer = len(a) - len(b)
    if a[at + max(longer, 0) + (not longer) :] == b[at + max(-longer, 0) + (not longer) :]:
        return Divergence(at, longer)
    for gap in range(1, _LONGEST + 1):
        if _lacks(a, b, at, gap):
            return Divergence(at, gap)
        if _lacks(b, a, at, gap):
            return Divergence(at, -gap)
    return Divergence(at, 0)


def _lacks(a: Sequence[object], b: Sequence[object], at: int, gap: int) -> bool:
    """Return whether ``b`` is ``a`` without the ``gap`` entries from ``at``, as far as is compared."""
    after = at + gap
    return after <= len(a) and a[after : after + _COMPARED] == b[at : at + _COMPARED]
