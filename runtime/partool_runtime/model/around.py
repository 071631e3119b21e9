"""The seam at which a module's own computation is run in another way: recomputed, or tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Around(Protocol):
    """Runs a module's computation; recomputation and tiling are of this type."""

    def __call__(self, compute: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        """Return what ``compute`` returns for ``inputs``."""
