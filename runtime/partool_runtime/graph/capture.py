"""Captures the forward pass of any module as one graph of torch functions, without memory for its tensors.

Dynamo records the graph before automatic differentiation, so attention is still one node on every device. Both sizes of
the tokens ``[B, S]`` are symbols in the graph, so that each tensor's shape shows which dimension holds the tokens.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx, nn

from partool_runtime.graph.nodes import expression, value_of
from partool_runtime.torch_internals.tracing import one_node, trace, without_memory

_BATCH = 3
"""Sequences of the example. Where code branches on sizes, :meth:`Captured.wrong_guard` tells for which the graph holds.
"""
_SHORT = 11
"""Shortest length of a second example."""


class CaptureError(Exception):
    """The forward pass cannot be captured as one graph; the text names the reason and the line of the model's code."""


class OneLengthError(CaptureError):
    """The code needs the length of the example to equal a certain number."""

    def __init__(self) -> None:
        super().__init__("its code works for one length of sequences only")


class Captured(NamedTuple):
    """One forward pass as a graph of torch functions."""

    graph: fx.Graph
    tokens: fx.Node
    """The input of tokens, ``[B, S]``."""
    positions: fx.Node | None
    """The input of positions, ``[B, S]``; None if the module takes none, or does not use them."""
    names: Mapping[fx.Node, str]
    """Name of the parameter or buffer that each other input of the graph stands for."""
    batch: sympy.Symbol | int
    length: sympy.Symbol
    """Symbols of the numbers of sequences and of tokens in a sequence; a graph of one sequence has the number 1."""
    guards: tuple[sympy.Basic, ...] = ()
    """Conditions on the sizes that the model's code asked for, and that the graph takes for granted."""

    def wrong_guard(self, batch: int, length: int) -> str:
        """Return a condition that does not hold for so many sequences and tokens; empty if all do."""
        numbers = {self.batch: batch, self.length: length}
        return next((str(guard) for guard in self.guards if guard.subs(numbers) == False), "")  # noqa: E712


@one_node
def call_experts(name: str, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Stand-in for the experts of the module ``name``, which map every token by itself; a single node of a graph."""
    return torch.empty_like(x)


def capture(
    module: nn.Module,
    *,
    dtype: torch.dtype,
    length: int,
    inputs: Mapping[str, str],
    fixed: Mapping[str, Any],
    training: bool,
    batch: int = _BATCH,
    opaque: Collection[str] = (),
    before: Callable[[nn.Module], None] = lambda _: None,
) -> Captured:
    """Return the graph of ``module``'s forward pass with parameters of type ``dtype``, for CPUs.

    Where code branches on the number of tokens, such as for sequences that are longer than a window, the graph holds
    the branch of ``length`` tokens. The example has no memory, so its length costs nothing. With a ``batch`` of 1 the
    graph is one of 1 sequence: torch treats this size otherwise than all larger ones, which share a graph. ``inputs``
    maps ``tokens`` and, if the module takes positions, ``positions`` to names of the module's arguments; ``fixed`` are
    further arguments; ``before`` changes the copy of the module that is traced. The first tensor that the module
    returns is the graph's result. ``opaque`` are names of experts, which map every token by itself: each stays one
    node, as its code may depend on the data. Raises :class:`CaptureError`.
    """
    traced = partial(
        _traced, module, dtype=dtype, inputs=inputs, fixed=fixed, training=training, opaque=opaque, before=before
    )
    sequences = min(batch, _BATCH)
    try:
        return traced((sequences, length))
    except OneLengthError as error:
        # The length may equal a size of the model by chance.
        try:
            return traced((sequences, _other_length(length)))
        except CaptureError:
            raise error from error.__cause__


def _other_length(length: int) -> int:
    """Return the largest prime below a length, which hardly any size of a model equals; at least :data:`_SHORT`."""
    primes = (each for each in range(length - 1, _SHORT, -1) if all(each % n for n in range(2, math.isqrt(each) + 1)))
    return next(primes, _SHORT)


def _traced(
    module: nn.Module,
    sizes: tuple[int, int],
    *,
    dtype: torch.dtype,
    inputs: Mapping[str, str],
    fixed: Mapping[str, Any],
    training: bool,
    opaque: Collection[str],
    before: Callable[[nn.Module], None],
) -> Captured:
    """Return the graph of a forward pass on an example of ``sizes``, the numbers of sequences and of tokens."""
    mode = without_memory()
    clone = _without_memory(module, mode, dtype, opaque).train(training)
    before(clone)
    with mode:
        given = {name: torch.zeros(sizes, dtype=torch.long) for name in inputs}
    arguments = {inputs[name]: tensor for name, tensor in given.items()}
    free = (1,) if sizes[0] == 1 else (0, 1)
    try:
        graph, examples = trace(
            _First(clone).train(training), {**arguments, **fixed}, dict.fromkeys(arguments, free), mode
        )
    except Exception as error:  # a model's own code may raise anything
        raise _problem(error) from error
    return _named(graph, examples, clone, given)


class _First(nn.Module):
    """Returns the first tensor of another module's result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **arguments: Any) -> Any:
        out = self.inner(**arguments)
        return out if isinstance(out, torch.Tensor) else out[0]


def inside(node: fx.Node) -> list[str]:
    """Return the names of the modules whose code made a node, outer ones first; ``""`` is the captured module."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    modules = [_ROOT.sub("", str(path), count=1) for path, _ in stack if _ROOT.match(str(path))]
    return [name.lstrip(".") for name in modules]


_ROOT = re.compile(r"L\['\w+'\](\[\d+\])?\.inner(?=\.|$)")


def line_of(node: fx.Node) -> str:
    """Return the file, line and code of a model that made a node; empty if torch did not record them."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s*(.*)', node.meta.get("stack_trace") or "")
    return f"{frames[-1][0]}:{frames[-1][1]}: {frames[-1][2].strip()}" if frames else ""


def where(node: fx.Node) -> str:
    """Return the module and the line of code that made a node, for messages."""
    names = [name for name in inside(node) if name]
    place = f" in {names[-1]}" if names else ""
    line = line_of(node)
    return f"{place} ({line})" if line else place


def _without_memory(
    module: nn.Module, mode: AbstractContextManager[Any], dtype: torch.dtype, opaque: Collection[str]
) -> nn.Module:
    """Return a copy of a module whose tensors have no memory, with its class's own forward passes."""
    clone = copy.deepcopy(module)
    for name, each in clone.named_modules():
        each.__dict__.pop("forward", None)
        for key, parameter in each._parameters.items():
            if parameter is not None:
                with mode:
                    made = torch.empty(parameter.shape, dtype=dtype)
                each._parameters[key] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        for key, buffer in each._buffers.items():
            if buffer is not None:
                with mode:
                    each._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)
        if name in opaque:
            each.__dict__["forward"] = partial(call_experts, name)
    return clone


def _named(graph: fx.GraphModule, examples: list[Any], clone: nn.Module, given: Mapping[str, torch.Tensor]) -> Captured:
    """Find out what each input of a graph stands for."""
    state_names = {id(tensor): name for name, tensor in clone.named_parameters(remove_duplicate=False)}
    state_names |= {id(tensor): name for name, tensor in clone.named_buffers(remove_duplicate=False)}
    input_names = {id(tensor): name for name, tensor in given.items()}
    inputs: dict[str, fx.Node] = {}
    names: dict[fx.Node, str] = {}
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), examples, strict=True):
        if id(example) in input_names:
            inputs[input_names[id(example)]] = node
        elif id(example) in state_names:
            names[node] = state_names[id(example)]
        elif isinstance(example, torch.Tensor):
            raise CaptureError(f"its code reads a tensor, {node.name}, that is neither a parameter nor a buffer")
    constant = next(iter(graph.graph.find_nodes(op="get_attr")), None)
    if constant is not None and isinstance(getattr(graph, str(constant.target)), nn.Module):
        raise CaptureError("its code has a backward pass of its own, or recomputes itself (torch.utils.checkpoint)")
    if constant is not None:
        raise CaptureError(f"its code holds a tensor, {constant.target}, that is neither a parameter nor a buffer")
    if "tokens" not in inputs:
        raise CaptureError("its forward pass does not read the tokens")
    batch, length = value_of(inputs["tokens"]).shape
    if not isinstance(length, torch.SymInt) or not isinstance(expression(length), sympy.Symbol):
        raise OneLengthError
    guards = tuple(guard.expr for guard in length.node.shape_env.guards)
    symbols = inputs.get("positions"), names, expression(batch), expression(length), guards
    return Captured(graph.graph, inputs["tokens"], *symbols)


def _problem(error: Exception) -> CaptureError:
    """Return an error with the first line of Dynamo's message, and the line of the model's code that it names."""
    text = str(error)
    if "onstraint" in text and "iolat" in text:
        return OneLengthError()
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    places = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s*(.*)', text)
    explained = re.search(r"Explanation: (.*)", text)
    why = f"{first}: {explained[1].strip()}" if explained else first
    return CaptureError(f"{why} ({places[-1][0]}:{places[-1][1]}: {places[-1][2].strip()})" if places else why)
