"""torch.compile of each block."""

from __future__ import annotations

import torch

from partool_runtime.model import Decoder


def compile_blocks(model: Decoder) -> None:
    """Compile the forward pass of every block; equal blocks share one compilation.

    Only ``forward`` is compiled, so hooks that gather and release parameters stay outside of the graph.
    """
    for block in model.layers:
        setattr(block, "forward", torch.compile(block.forward))  # noqa: B010 - mypy forbids assigning a method
