"""How a layer's sharded parameters are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from partool.spec.parallel import Gather, ZeroStage

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Controls:
    """Settings of the all-gathers of a layer's parameters."""

    gather: Gather = "coalesced"
    prefetch: int = 1
    persistent_elements: int = 0

    def keeps(self, shape: Shape, zero: ZeroStage) -> bool:
        """Return True if a parameter stays gathered between steps."""
        return zero == 3 and 0 < prod(shape) <= self.persistent_elements


COALESCED = Controls()
"""Default settings of FSDP2."""
