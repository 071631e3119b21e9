"""Traces a forward pass into a graph on tensors without memory.

Dynamo is public as ``torch.compile``, but not the tensors without memory (``torch.export`` makes them, and changes the
graph), nor modes that see the operators of torch, nor the mark by which a function stays one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NODES: list[Callable[..., Any]] = []
"""Functions that stay one node of a graph."""
OperatorMode = TorchDispatchMode
"""Base of contexts that see every operator, after functions that consist of others are taken apart."""


def one_node(function: _Function) -> _Function:
    """Let a function stay one node of a graph; a decorator.

    Dynamo is told when it traces: importing it takes a second, which processes that trace nothing do not pay.
    """
    _NODES.append(function)
    return function


def without_memory() -> AbstractContextManager[Any]:
    """Return a context whose new tensors have shapes, types and devices, but no memory; sizes may be symbols."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def context_of(tensor: torch.Tensor) -> AbstractContextManager[Any] | None:
    """Return the context in which a tensor without memory was made; None for other tensors."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def trace(
    module: nn.Module, arguments: Mapping[str, Any], free: Mapping[str, tuple[int, ...]], mode: Any
) -> tuple[fx.GraphModule, list[Any]]:
    """Return the graph of one call of a module, and the tensors and sizes that are the graph's inputs.

    ``free`` are the dimensions of arguments whose sizes are symbols in the graph. ``mode`` is the
    :func:`without_memory` in which the module's tensors and the arguments were made. Raises whatever Dynamo raises
    where the call is more than a graph. A module that trains is traced with gradients, others without.
    """
    seen: list[tuple[fx.GraphModule, list[Any]]] = []

    def take(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        seen.append((graph, examples))
        return graph.forward

    for function in _NODES:
        torch._dynamo.allow_in_graph(function)  # type: ignore[no-untyped-call]
    for name, dims in free.items():
        torch._dynamo.mark_dynamic(arguments[name], dims)
    torch._dynamo.reset()
    try:
        with mode, torch.set_grad_enabled(module.training), torch.compiler.set_stance("default"), _torch_functions():
            torch.compile(module, backend=take, fullgraph=True)(**arguments)
    finally:
        torch._dynamo.reset()
    return seen[0]


_REPLACED = (
    (F, "scaled_dot_product_attention", F.scaled_dot_product_attention),
    (torch, "tensor", torch.tensor),
    (torch, "compile", torch.compile),
)
"""Functions of torch that a dry run replaces, by module and name."""


@contextmanager
def _torch_functions() -> Iterator[None]:
    """Undo within the context what a dry run replaces, so that a graph holds torch's own functions."""
    before = [getattr(module, name) for module, name, _ in _REPLACED]
    for module, name, original in _REPLACED:
        setattr(module, name, original)
    try:
        yield
    finally:
        for (module, name, _), replaced in zip(_REPLACED, before, strict=True):
            setattr(module, name, replaced)
