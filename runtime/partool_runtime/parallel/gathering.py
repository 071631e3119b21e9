"""How far ahead of their use ZeRO-3 gathers parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule

Layer = Sequence[FSDPModule]
"""Units that are gathered for one layer: its own, then those within it, in the order of use."""


def prefetch(layers: Sequence[Layer], root: FSDPModule, depth: int, *, forward: bool = True) -> None:
    """Gather ``depth`` layers ahead of the one that computes, in forward (if asked for) and backward passes.

    Left alone, FSDP2 gathers one unit ahead in backward passes, in the order of the forward passes that it saw last; in
    a pipeline other micro-batches lie between a forward pass and its backward pass. A unit that names itself, which is
    gathered already, gathers nothing ahead. The root's own parameters are gathered when the forward pass begins, and
    last of all used.
    """
    for index, layer in enumerate(layers):
        behind = _flat(reversed(layers[max(0, index - depth) : index])) if depth else []
        ahead = _flat(layers[index + 1 : index + 1 + depth])
        first, inner = layer[0], list(layer[1:])
        first.set_modules_to_backward_prefetch([*(inner[::-1] if depth else ()), *behind] or [first])
        for unit in inner:
            unit.set_modules_to_backward_prefetch([unit])
        if forward:
            first.set_modules_to_forward_prefetch([*(inner if depth else ()), *ahead])
    root.set_modules_to_backward_prefetch(
        _flat(reversed(layers[len(layers) - depth :])) if depth and layers else [root]
    )
    if forward:
        root.set_modules_to_forward_prefetch(_flat(layers[:depth]))


def _flat(layers: object) -> list[FSDPModule]:
    return [unit for layer in layers for unit in layer]  # type: ignore[attr-defined]
