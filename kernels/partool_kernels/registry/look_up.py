"""From a request to a configuration."""

from __future__ import annotations

from partool_kernels.registry.kernels import KERNELS
from partool_kernels.registry.types import Choice, Request


def get(request: Request) -> Choice:
    """Return the best known configuration for a request; raises KeyError for an unknown kernel."""
    return Choice("triton", KERNELS[request.kernel].default(request), "heuristic", 0.0)
