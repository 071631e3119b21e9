"""Says where a price comes from, for people who read plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OriginKind = Literal["measured", "interpolated", "scaled", "assumed"]


@dataclass(frozen=True, slots=True)
class PriceOrigin:
    """Where the seconds of one kernel or collective come from."""

    kind: OriginKind
    """``measured``: a table of measurements has this very point; ``interpolated``: it has the points around it;
    ``scaled``: a measurement times a stated ratio; ``assumed``: an equation without measurements of this device."""
    text: str
    """Who measured what, and the ratios."""
