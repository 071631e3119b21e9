"""Compilation that divides graphs into forward and backward passes, and generates no code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch import config

_BACKEND = "aot_eager_decomp_partition"
"""Backend of ``torch.compile``: decompositions and partitioner of the default backend, operators run one by one."""


@contextmanager
def partitioned() -> Iterator[None]:
    """Make ``torch.compile`` choose what a backward pass keeps and what it computes again, without generating code.

    Random numbers are recomputed through copies of their generator's state: the other way needs a GPU's generator.
    """
    patch = config.patch(graphsafe_rng_functionalization=False)
    try:
        with patch, torch.compiler.set_stance("default", force_backend=_BACKEND):
            yield
    finally:
        torch.compiler.reset()  # graphs of one rank must not run on another one
