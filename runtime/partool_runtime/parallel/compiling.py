"""torch.compile of each block."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile the forward pass of every block; equal blocks share one compilation.

    Only ``forward`` is compiled, so hooks that gather and release parameters stay outside of the graph.
    """
    for block in blocks:
        setattr(block, "forward", torch.compile(block.forward))  # noqa: B010 - mypy forbids assigning a method
