"""Rewrites a captured graph so that a rank computes its share of the tokens (AutoSP, arXiv 2604.27089, section 3).

A value is either *whole* or a *share*. Whole values, such as positions and masks, depend on no token: every rank
computes them for whole sequences. Shares depend on tokens, and hold the rank's tokens only. Where a share meets a whole
value with a dimension of tokens, the rank's part of that dimension is cut out. Attention alone mixes tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from partool_runtime.errors import ConfigurationError
from partool_runtime.graph.attention import AttentionNode, attention_node
from partool_runtime.graph.capture import Captured, CaptureError, call_experts, inside, where
from partool_runtime.graph.functions import allocates, draws, fill_of, name_of, takes_sizes, written
from partool_runtime.graph.nodes import Number, expression, in_proportion, is_number, token_dims, value_of

_SILENT = frozenset({"_log_api_usage_once"})
"""Names of functions in graphs that compute nothing."""

Replacement = Callable[..., torch.Tensor]
"""Function of (heads, mask, sinks, documents) that replaces an attention node."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a rank needs to rewrite a graph."""

    batch: int
    """Sequences of a micro-batch."""
    length: int
    """Tokens of a whole sequence."""
    span: tuple[int, int]
    """The rank's tokens: the first, and the one after the last."""
    attention: Callable[[AttentionNode], tuple[Replacement, bool]]
    """Returns what replaces an attention node, and whether it needs the node's mask."""
    experts: Callable[[str], Callable[..., torch.Tensor]]
    """Returns the function that computes the experts of a module."""
    device: torch.device
    """Device of the run; the graph was captured for CPUs."""


@dataclass(slots=True)
class Shared:
    """A graph of a rank's share. Its inputs are tokens ``[B, S]`` and, if they are used, positions and documents."""

    graph: fx.Graph
    attention: list[tuple[fx.Node, Replacement]] = field(default_factory=list)
    """Nodes of the new graph that replaced attention, with what they call."""

    def within(self, module: str) -> list[Any]:
        """Return what replaced the attention nodes of a module, by its name."""
        return [replacement for node, replacement in self.attention if module in inside(node)]


def share(captured: Captured, sharing: Sharing) -> Shared:
    """Return the graph of a rank's share of the tokens; raises :class:`CaptureError`."""
    return _Rewriting(captured, sharing).run()


def shares_of(captured: Captured) -> set[fx.Node]:
    """Return the nodes of a captured graph that depend on tokens; raises :class:`CaptureError`.

    A tensor that code allocates, and then fills with values of tokens, depends on tokens from the beginning.
    """
    shares = {captured.tokens}
    while True:
        for node in captured.graph.nodes:
            if not is_number(node) and any(each in shares for each in node.all_input_nodes):
                shares.add(node)
        filled = [node for node in shares if (changed := written(node)) is not None and changed not in shares]
        if not filled:
            return shares
        for node in filled:
            changed = written(node)
            assert changed is not None
            if not allocates(changed):
                raise CaptureError(f"its code writes values of tokens into a tensor that has others{where(node)}")
            shares.add(changed)


class _Rewriting:
    """One rewriting; ``full`` and ``mine`` map nodes of the captured graph to nodes or numbers of the new one."""

    def __init__(self, captured: Captured, sharing: Sharing) -> None:
        self.captured, self.sharing = captured, sharing
        self.out = Shared(fx.Graph())
        self.shares = shares_of(captured)
        self.full: dict[fx.Node, Any] = {}
        self.mine: dict[fx.Node, Any] = {}
        self.documents: fx.Node | None = None
        self.sizes: tuple[Any, Any] = (None, None)
        """The numbers of sequences, and of this rank's tokens."""

    def run(self) -> Shared:
        graph = self.out.graph
        tokens = graph.placeholder("tokens_BS")
        positions = graph.placeholder("positions_BL")
        self.documents = graph.placeholder("documents_BL")
        check = _function(partial(_sizes, self.captured, self.sharing.length))
        self.sizes = graph.call_function(check, (tokens,)), graph.call_method("size", (tokens, 1))
        _check_guards(self.captured, self.sharing.batch, self.sharing.length)
        placeholders = {self.captured.tokens: tokens, self.captured.positions: positions}
        for node in self.captured.graph.nodes:
            if node in placeholders:
                self.full[node] = self.mine[node] = placeholders[node]
                placeholders[node].meta = dict(node.meta)
            elif node in self.captured.names:
                self.full[node] = self.mine[node] = made = graph.get_attr(self.captured.names[node])
                made.meta = dict(node.meta)
            elif node.op == "placeholder":
                self._number(node)
            elif node.op == "output":
                graph.output(self._result(node))
            else:
                self._copy(node)
        if not self.out.attention:
            raise CaptureError("it has no attention that partool knows")
        # By default torch removes nodes that write into a tensor, as nothing reads the writing nodes themselves.
        graph.eliminate_dead_code(lambda node: node.is_impure() or written(node) is not None)
        graph.lint()
        return self.out

    def _number(self, node: fx.Node) -> None:
        """Compute a number or a shape anew, for whole sequences and for the rank's share."""
        value = value_of(node)
        if node.op == "placeholder" and expression(value) not in (self.captured.batch, self.captured.length):
            raise CaptureError(f"its graph has an input {node.name} that is neither a size of the tokens nor a tensor")
        batch, length = self.sizes
        number = _function(Number(value, self.captured.batch, self.captured.length))
        self.full[node] = self.out.graph.call_function(number, (batch, self.sharing.length))
        self.full[node].meta = dict(node.meta)
        if in_proportion(value, self.captured.length):
            self.mine[node] = self.out.graph.call_function(number, (batch, length))
            self.mine[node].meta = dict(node.meta)

    def _copy(self, node: fx.Node) -> None:
        if name_of(node) in _SILENT:
            return
        if is_number(node):
            self._number(node)
            return
        attention = attention_node(node)
        if attention is not None:
            self.mine[node] = self._attention(node, attention)
        elif node in self.shares:
            self.mine[node] = self._mine(node)
        else:
            if draws(node):
                raise CaptureError(f"its code draws random numbers, which ranks would draw otherwise{where(node)}")
            self.full[node] = self._placed(node, self.full.__getitem__)

    def _placed(self, node: fx.Node, find: Callable[[fx.Node], Any]) -> fx.Node:
        """Copy a node into the new graph; devices that it names become the device of the run."""

        def copied(value: Any) -> Any:
            if isinstance(value, torch.device):
                return self.sharing.device
            return self.sharing.device.type if isinstance(value, str) and value == "cpu" else value

        made = self.out.graph.node_copy(node, find)
        made.args = fx.node.map_aggregate(made.args, copied)
        made.kwargs = fx.node.map_aggregate(made.kwargs, copied)
        return made

    def _mine(self, node: fx.Node) -> fx.Node:
        if isinstance(fill_of(node), fx.Node):
            raise CaptureError(f"its code fills a tensor with a number that follows the tokens{where(node)}")
        given = [self._given(each, node) for each in node.all_input_nodes]
        copies = dict(zip(node.all_input_nodes, given, strict=True))
        if node.target is call_experts:
            name, *tensors = fx.node.map_arg(node.args, copies.__getitem__)
            made = self.out.graph.call_function(_function(self.sharing.experts(str(name))), tuple(tensors))
            made.meta = dict(node.meta)
            return made
        made = self._placed(node, copies.__getitem__)
        value = value_of(made)
        if len(token_dims(value, self.captured.length)) > 1:
            raise CaptureError(f"its code compares tokens with tokens outside of attention that is known{where(node)}")
        return made

    def _given(self, value: fx.Node, user: fx.Node) -> Any:
        """Return a share's input: a share, a number for the rank's tokens, or the rank's part of a whole value."""
        if is_number(value) and not takes_sizes(user):
            return self.full[value]  # a value, such as the length that a mean is divided by
        if value in self.mine:
            return self.mine[value]
        if is_number(value):
            raise CaptureError(f"its code makes a shape that is in no proportion to the tokens{where(user)}")
        example, length = value_of(value), self.captured.length
        dims = token_dims(example, length)
        if not dims:
            return self.full[value]
        if len(dims) > 1 or expression(example.shape[dims[0]]) != length:
            raise CaptureError(f"its code meets a value of pairs of tokens outside of attention{where(user)}")
        first, stop = self.sharing.span
        with self.out.graph.inserting_after(self.full[value]):
            part = self.out.graph.call_method("narrow", (self.full[value], dims[0], first, stop - first))
        part.meta = dict(self.full[value].meta)
        self.mine[value] = part
        return part

    def _attention(self, node: fx.Node, attention: AttentionNode) -> fx.Node:
        if not all(each in self.shares for each in attention.heads):
            raise CaptureError(f"its attention reads heads that depend on no token{where(node)}")
        if attention.mask is not None and attention.mask in self.shares:
            raise CaptureError(f"its attention has a mask that depends on tokens{where(node)}")
        for each in attention.heads:
            shape = value_of(each).shape
            if expression(shape[2]) != self.captured.length:
                raise CaptureError(f"its attention has heads of {shape}, not [B, heads, tokens, width]{where(node)}")
        replacement, needs_mask = self.sharing.attention(attention)
        mask = self.full[attention.mask] if attention.mask is not None and needs_mask else None
        sinks = None if attention.sinks is None else self._given(attention.sinks, node)
        heads = tuple(self.mine[each] for each in attention.heads)
        made = self.out.graph.call_function(_function(replacement), (heads, mask, sinks, self.documents))
        made.meta = dict(node.meta)
        self.out.attention.append((made, replacement))
        return made

    def _result(self, node: fx.Node) -> Any:
        returned = node.args[0]
        result = returned[0] if isinstance(returned, tuple | list) else returned
        if not isinstance(result, fx.Node) or result not in self.shares:
            raise CaptureError("its result does not depend on the tokens")
        example = value_of(result)
        if token_dims(example, self.captured.length) != [1]:
            raise CaptureError(f"its result has the shape {tuple(example.shape)}, not [B, tokens, width]")
        return self.mine[result]


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls an object; nodes of a graph need names, which objects lack."""

    def called(*args: Any) -> Any:
        return call(*args)

    return called


def _sizes(captured: Captured, length: int, tokens_BS: torch.Tensor) -> int:
    """Return the number of sequences of a pass; raises ConfigurationError PT448 if the graph is of another number."""
    batch = tokens_BS.shape[0]
    try:
        _check_guards(captured, batch, length)
    except CaptureError as error:
        raise ConfigurationError("PT448", str(error), "Use one size of micro-batches.") from None
    return batch


def _check_guards(captured: Captured, batch: int, length: int) -> None:
    """Raise :class:`CaptureError` if code takes another branch for these sizes than it took in the graph."""
    if isinstance(captured.batch, int) and batch != captured.batch:
        raise CaptureError(f"its graph is of {captured.batch} sequence, and is called with {batch}")
    wrong = captured.wrong_guard(batch, length)
    if wrong:
        message = f"its code branches on sizes ({wrong}), and takes another way for {batch} × {length} tokens"
        raise CaptureError(f"{message} than for the example of the graph")
