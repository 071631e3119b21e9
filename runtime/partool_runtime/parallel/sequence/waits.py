"""Waits for other ranks of a team, whose time is told apart from that of other exchanges."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from partool_runtime.parallel.comm import SEQUENCE
from partool_runtime.torch_internals import collectives


def finished(x: torch.Tensor) -> torch.Tensor:
    """See :func:`partool_runtime.torch_internals.collectives.finished`."""
    return collectives.finished(x, SEQUENCE)


def waiting() -> AbstractContextManager[None]:
    """Return what is entered around a wait that is no functional collective's."""
    return collectives.waiting(SEQUENCE)
