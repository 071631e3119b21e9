"""Recognises masks that follow a known rule, so that attention needs no mask of all pairs of tokens.

A mask that no token changes is computed from the numbers of sequences and tokens alone. So the part of the graph that
makes it can be computed for small numbers, and compared with the rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from partool_runtime.graph.capture import Captured
from partool_runtime.graph.functions import name_of
from partool_runtime.graph.nodes import Number, computed, expression, is_number, value_of
from partool_runtime.model.attention import AttentionLayout, visible
from partool_runtime.torch_internals.tensors import without_modes

_BATCH = 2
_SHORT, _WHOLE = 67, 4096
"""Length of a short sequence, and of the longest one for which the whole mask is computed."""
_GAPS = ((_SHORT, 11), (2 * _SHORT + 1, 17))
"""Two ways to shorten the gaps between integers of a mask: the first gap becomes at most the first number, each further
one may be longer by the second, so that differences of integers are no integers of the mask."""
_NEAR = 2
"""A window differs by no more from the integer in the code that makes it."""
_CALLS = frozenset({
    "arange", "getitem", "unsqueeze", "expand", "view", "reshape", "to", "bool", "and_", "or_", "invert", "ge", "gt",
    "le", "lt", "eq", "ne", "add", "sub", "neg", "abs", "where", "masked_fill", "full", "zeros", "ones", "new_zeros",
    "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "tril", "triu", "logical_and", "logical_or",
    "logical_not", "__and__", "__or__", "__invert__", "size", "diff", "cumsum", "narrow", "contiguous", "clone",
    "tensor", "scalar_tensor", "broadcast_tensors", "_set_grad_enabled", "finfo", "squeeze", "transpose", "long", "int",
})  # fmt: skip
"""Functions in which a distance between tokens is compared with integers of the graph, and with nothing else."""


def rule_of(mask: fx.Node, captured: Captured, buffers: Mapping[str, torch.Tensor], length: int) -> int | str | None:
    """Return the window of a causal mask (None: all earlier tokens), or why the mask follows no known rule.

    The mask of all pairs is computed and compared with the rule. Above :data:`_WHOLE` tokens that would take too much
    memory. There the mask must be made by :data:`_CALLS` only, which compare distances with integers of the graph, and
    is computed for short sequences and with small integers in place of large ones. A window is one of these integers,
    or next to one.
    """
    nodes = _ancestors(mask)
    if any(node in captured.names and captured.names[node] not in buffers for node in nodes):
        return "it is learned"
    trials = [_Trial(length)]
    if length > _WHOLE:
        if other := next((node for node in nodes if not _is_simple(node, captured)), None):
            return f"{name_of(other) or other.name} makes it, and it is too long to compute it for a test"
        integers = {number for node in nodes if not is_number(node) for number in _integers((node.args, node.kwargs))}
        trials = [_Trial.of(integers, *gaps) for gaps in _GAPS]
        if max(trial.length for trial in trials) > _WHOLE:
            return "it has too many integers to compute it for a test"
    windows: set[int | None] = set()
    for trial in trials:
        try:
            with without_modes(), torch.no_grad():
                seen = _seen(_computed(mask, nodes, captured, buffers, trial))
        except Exception as error:  # a model's own code may raise anything
            return f"it cannot be computed for a test ({type(error).__name__})"
        window = _window(seen, trial)
        if isinstance(window, str):
            return window
        # Sequences no longer than the window show no window.
        windows.add(window if window is None or window < length else None)
    return windows.pop() if len(windows) == 1 else "its window grows with the sequence"


@dataclass(frozen=True)
class _Trial:
    """A length for which a mask is computed, and the numbers that stand for large integers in its code."""

    length: int
    numbers: Mapping[int, int] = field(default_factory=dict)
    """By integer, the number that stands for it; no larger, in the same order."""

    @classmethod
    def of(cls, integers: Collection[int], gap: int, more: int) -> _Trial:
        """Return a trial in which gaps between integers above :data:`_SHORT` are shortened to about ``gap``."""
        numbers, before, last = dict[int, int](), 0, 0
        for number in sorted(integers):
            last += min(number - before, gap)
            if number > _SHORT:
                gap += more
            before, numbers[number] = number, last
        return cls(max(last, gap) + _NEAR + 1, numbers)

    def small(self, value: Any) -> Any:
        """Return what stands for a constant of the graph."""
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        number = self.numbers.get(abs(value), abs(value))
        return number if value >= 0 else -number

    def window(self, window: int) -> int | None:
        """Return the window of the graph's integers for one of this trial's; None if no integer is near."""
        near = [number + window - small for number, small in self.numbers.items() if abs(window - small) <= _NEAR]
        return window if not self.numbers else near[0] if near else None


def _window(seen: torch.Tensor | None, trial: _Trial) -> int | str | None:
    """Return the window that a mask shows (None: all earlier tokens), or why it follows no rule."""
    tokens = trial.length
    if seen is None or seen.shape[-2:] != (tokens, tokens):
        return "it is no mask of zeros and minus infinity over all tokens"
    window = int(seen.reshape(-1, tokens)[-1].sum())
    layout = AttentionLayout(window if window < tokens else None)
    places = torch.arange(tokens)
    if not bool((seen == visible(places, places, layout)).all()):
        return "it is not causal, with or without a window"
    if layout.window is None:
        return None
    general_window = trial.window(layout.window)
    return "its window is none of the integers in the code that makes it" if general_window is None else general_window


def _is_simple(node: fx.Node, captured: Captured) -> bool:
    """Return True if a node of a mask compares places with integers, or makes such a comparison a mask."""
    if node in captured.names:
        return False
    if is_number(node):
        return not any(abs(each) > _SHORT for each in _integers_of(value_of(node)))
    if node.op == "placeholder":
        return True
    floats = [each for each in _numbers((node.args, node.kwargs)) if isinstance(each, float)]
    return name_of(node) in _CALLS and all(each == 0 or abs(each) > _HIDDEN for each in floats)


_HIDDEN = 1e30
"""Numbers above this stand for infinity in masks that are added to scores; float16 masks have none."""


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """Return the nodes from which a node is computed, and the node, in the order of the graph."""
    ancestors, ahead = {node}, [node]
    while ahead:
        new = [each for each in ahead.pop().all_input_nodes if each not in ancestors]
        ancestors.update(new)
        ahead += new
    return [each for each in node.graph.nodes if each in ancestors]


def _integers_of(number: Any) -> set[int]:
    """Return the integers in the expression of a number; a shape is not compared with places."""
    if isinstance(number, tuple):
        return set()
    return {int(each) for each in sympy.sympify(expression(number)).atoms(sympy.Integer)}


def _integers(value: Any) -> set[int]:
    return {abs(each) for each in _numbers(value) if isinstance(each, int) and not isinstance(each, bool)}


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, slice):
        yield from _numbers((value.start, value.stop, value.step))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))


def _computed(
    mask: fx.Node, nodes: list[fx.Node], captured: Captured, buffers: Mapping[str, torch.Tensor], trial: _Trial
) -> Any:
    """Compute a mask on the CPU for the sequences and integers of a trial."""
    length = trial.length
    values: dict[fx.Node, Any] = {}
    batch = captured.batch if isinstance(captured.batch, int) else _BATCH
    for node in nodes:
        if node is captured.positions:
            values[node] = torch.arange(length)[None].expand(batch, length)
        elif node in captured.names:
            values[node] = buffers[captured.names[node]]
        elif is_number(node):
            values[node] = Number(value_of(node), captured.batch, captured.length)(batch, length)
        else:
            values[node] = computed(node, values.__getitem__, trial.small)
    return values[mask]


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as one of booleans; None if it is a bias on scores that hides nothing and changes something."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return ~hidden if bool((hidden | (mask == 0)).all()) else None
