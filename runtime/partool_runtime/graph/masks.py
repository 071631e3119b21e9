"""Recognises masks that follow a known rule, so that attention needs no mask of all pairs of tokens.

A mask that no token changes is computed from the numbers of sequences and tokens alone. So the part of the graph that
makes it can be computed for small numbers, and compared with the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from partool_runtime.graph.capture import Captured
from partool_runtime.graph.nodes import computed, expression, value_of
from partool_runtime.model.attention import AttentionLayout, visible
from partool_runtime.torch_internals.tensors import without_modes

_BATCH = 2
_SHORT, _LONGEST = 67, 16_384
"""Lengths of sequences for which masks are computed: the first is short, none is longer than the last."""


def rule_of(mask: fx.Node, captured: Captured, buffers: Mapping[str, torch.Tensor], length: int) -> int | str | None:
    """Return the window of a causal mask (None: all earlier tokens), or why the mask follows no known rule.

    The mask is compared for sequences of ``length`` tokens or, if these are long, for two short lengths and for lengths
    just above each integer in the mask's part of the graph, as a window must be one of these integers, or next to one.
    """
    nodes = _ancestors(mask)
    numbers = {number for node in nodes for number in _integers((node.args, node.kwargs)) if number < length}
    lengths = {_SHORT, 2 * _SHORT + 1, *(number + 3 for number in numbers if number > _SHORT)}
    lengths = {min(each, length) for each in lengths}
    if max(lengths) > _LONGEST:
        return "its window is too long to compute the mask for a test"
    found: set[int | None] = set()
    for tokens in sorted(lengths):
        with without_modes(), torch.no_grad():
            seen = _seen(_computed(mask, nodes, captured, buffers, tokens))
        if seen is None or seen.shape[-2:] != (tokens, tokens):
            return "it is no mask of zeros and minus infinity over all tokens"
        window = int(seen.reshape(-1, tokens)[-1].sum())
        layout = AttentionLayout(window if window < tokens else None)
        places = torch.arange(tokens)
        if not bool((seen == visible(places, places, layout)).all()):
            return "it is not causal, with or without a window"
        found.add(layout.window)
    windows = found - {None}
    # Sequences no longer than the window show no window.
    return windows.pop() if len(windows) == 1 else None if not windows else "its window grows with the sequence"


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """Return the nodes from which a node is computed, and the node, in the order of the graph."""
    found, ahead = {node}, [node]
    while ahead:
        new = [each for each in ahead.pop().all_input_nodes if each not in found]
        found.update(new)
        ahead += new
    return [each for each in node.graph.nodes if each in found]


def _integers(value: Any) -> set[int]:
    if isinstance(value, bool):
        return set()
    if isinstance(value, int):
        return {abs(value)}
    if isinstance(value, slice):
        return _integers((value.start, value.stop, value.step))
    if isinstance(value, tuple | list):
        return {number for each in value for number in _integers(each)}
    return {number for each in value.values() for number in _integers(each)} if isinstance(value, dict) else set()


def _computed(
    mask: fx.Node, nodes: list[fx.Node], captured: Captured, buffers: Mapping[str, torch.Tensor], length: int
) -> Any:
    """Compute a mask on the CPU for sequences of ``length`` tokens."""
    values: dict[fx.Node, Any] = {}
    sizes = {captured.batch: _BATCH, captured.length: length}
    for node in nodes:
        if node is captured.positions:
            values[node] = torch.arange(length)[None].expand(_BATCH, length)
        elif node in captured.names:
            values[node] = buffers[captured.names[node]]
        elif node.op == "placeholder":
            values[node] = sizes[expression(value_of(node))]
        else:
            values[node] = computed(node, values.__getitem__)
    return values[mask]


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as one of booleans; None if it is a bias on scores that hides nothing and changes something."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return ~hidden if bool((hidden | (mask == 0)).all()) else None
