"""Where a price comes from, for reports."""

from __future__ import annotations

from typing import Literal, NamedTuple

PriceKind = Literal["measured", "interpolated", "scaled", "assumed"]


class PriceOrigin(NamedTuple):
    """Where a price comes from.

    ``measured``: a point of a table; ``interpolated``: between points of a table; ``scaled``: from a table by a stated
    ratio; ``assumed``: an equation.
    """

    kind: PriceKind
    text: str
    """Kernel, software and device that were measured, or the equation."""
