"""Says where a price comes from."""

from __future__ import annotations

from typing import Literal, NamedTuple


class PriceOrigin(NamedTuple):
    """Where a price comes from."""

    kind: Literal["measured", "interpolated", "scaled", "assumed"]
    """``measured``: at this point; ``interpolated``: between measured points; ``scaled``: from a measurement of another
    kernel, device or size by a stated ratio; ``assumed``: an equation without a measurement."""
    text: str
    """Kernel, software and device that were measured, or what the equation assumes."""
