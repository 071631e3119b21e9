"""Cuts a graph at modules, so that each module runs its own nodes in a forward pass of its own.

FSDP2 gathers the parameters of a module before the module is called and releases them after. It cannot be part of a
graph, and one graph of the whole model would need all parameters at once. So the graph of the whole forward pass is cut
at the modules that are gathered: their calls stay calls, within the graph of the rest.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from itertools import count, pairwise
from types import MethodType
from typing import Any

from torch import fx, nn

from partool_runtime.graph.capture import CaptureError, inside

_NUMBERS = count()
Forward = Callable[..., Any]


def cut(graph: fx.Graph, root: nn.Module, units: Sequence[str]) -> tuple[Forward, dict[str, Forward]]:
    """Return functions for the rest of a graph and for each of ``units``, names of modules within ``root``.

    A unit's function is a replacement of the module's forward pass, and reads parameters at the time of the call; the
    rest is one of the root, and calls the units' modules. Raises :class:`CaptureError` if a unit is not called exactly
    once.
    """
    nodes = list(graph.nodes)
    spans = {unit: _span(nodes, unit) for unit in units}
    ordered = sorted(spans, key=lambda unit: spans[unit])
    for before, after in pairwise(ordered):
        if spans[before][1] > spans[after][0]:
            raise CaptureError(f"its code mixes the computation of {before} and of {after}")
    outer, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    at, forwards = 0, {}
    for unit in ordered:
        first, stop = spans[unit]
        _copied(nodes[at:first], outer, copies)
        part = _Part(unit, nodes[first:stop])
        forwards[unit] = _function(part.graph, root.get_submodule(unit), unit)
        part.call(outer, copies)
        at = stop
    _copied(nodes[at:], outer, copies)
    return _function(outer, root, "the model"), forwards


def _span(nodes: Sequence[fx.Node], unit: str) -> tuple[int, int]:
    """Return the range of a unit's nodes."""
    mine = [at for at, node in enumerate(nodes) if node.op != "get_attr" and unit in inside(node)]
    if not mine:
        raise CaptureError(f"its code does not call {unit}")
    return mine[0], mine[-1] + 1


def _copied(nodes: Iterable[fx.Node], into: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    for node in nodes:
        copies[node] = into.node_copy(node, copies.__getitem__)


class _Part:
    """The nodes of one unit as a graph of its own, with its inputs and outputs in the whole graph."""

    def __init__(self, unit: str, nodes: Sequence[fx.Node]) -> None:
        self.unit, self.graph = unit, fx.Graph()
        inner_nodes = set(nodes)
        self.inputs: list[fx.Node] = []
        copies: dict[fx.Node, fx.Node] = {}
        needed = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inner_nodes)
        for node in needed:
            if not self._owns(node):
                self.inputs.append(node)
                copies[node] = self.graph.placeholder(node.name)
        for node in needed:
            if self._owns(node):
                copies[node] = self.graph.get_attr(str(node.target).removeprefix(f"{unit}."))
        for node in nodes:
            if node.op == "get_attr" and self._owns(node):
                copies[node] = self.graph.get_attr(str(node.target).removeprefix(f"{unit}."))
            else:
                copies[node] = self.graph.node_copy(node, copies.__getitem__)
        self.outputs = [node for node in nodes if any(user not in inner_nodes for user in node.users)]
        results = tuple(copies[node] for node in self.outputs)
        self.graph.output(results[0] if len(results) == 1 else results)
        self.graph.lint()

    def call(self, outer: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        """Add the call of the unit's module to the outer graph."""
        called = outer.call_module(self.unit, tuple(copies[node] for node in self.inputs))
        if len(self.outputs) == 1:
            copies[self.outputs[0]] = called
            return
        for number, node in enumerate(self.outputs):
            copies[node] = outer.call_method("__getitem__", (called, number))

    def _owns(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and str(node.target).startswith(f"{self.unit}.")


def _function(graph: fx.Graph, module: nn.Module, name: str) -> Forward:
    """Return a graph as a method of a module, which looks up parameters and modules when it is called."""
    graph.lint()
    code = graph.python_code(root_module="self")
    file = f"<partool graph {next(_NUMBERS)} of {name}>"
    space: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, file, "exec"), space)
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    return MethodType(space["forward"], module)
