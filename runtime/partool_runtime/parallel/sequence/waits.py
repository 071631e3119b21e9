"""Waits for other ranks of a team, whose time is told apart from that of other exchanges."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from partool_runtime import torch_internals
from partool_runtime.parallel.comm import SEQUENCE


def finished(x: torch.Tensor) -> torch.Tensor:
    """See :func:`partool_runtime.torch_internals.finished`."""
    return torch_internals.finished(x, SEQUENCE)


def waiting() -> AbstractContextManager[None]:
    """Return what is entered around a wait that is no functional collective's."""
    return torch_internals.waiting(SEQUENCE)
