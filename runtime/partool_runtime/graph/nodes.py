"""Questions to the nodes of a captured graph: their example values, and their results for other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import sympy
import torch
from torch import fx


def value_of(node: Any) -> Any:
    """Return the example value that was recorded for a node: a tensor without memory, a number, or a tuple of them."""
    return node.meta.get("example_value")


def computed(node: fx.Node, find: Callable[[fx.Node], Any]) -> Any:
    """Return the result of a node, given a function that returns the values of the nodes that it reads."""
    args = cast("tuple[Any, ...]", fx.node.map_arg(node.args, find))
    kwargs = cast("dict[str, Any]", fx.node.map_arg(node.kwargs, find))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return cast("Callable[..., Any]", node.target)(*args, **kwargs)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def token_dims(value: Any, length: sympy.Symbol) -> list[int]:
    """Return the dimensions of a tensor whose size depends on the number of tokens."""
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return [at for at, size in enumerate(sizes) if isinstance(size, torch.SymInt) and length in _symbols(size)]


def is_number(node: fx.Node) -> bool:
    """Return True if a node makes a number, or a shape, from numbers."""
    numbers = torch.SymInt | torch.SymBool | torch.SymFloat | int | bool | float
    value = value_of(node)
    shape = isinstance(value, tuple) and value != () and all(isinstance(each, numbers) for each in value)
    return isinstance(value, numbers) or shape


def in_proportion(value: Any, length: sympy.Symbol) -> bool:
    """Return True if numbers are in proportion to the number of tokens, or do not depend on it."""
    if isinstance(value, tuple):
        return all(in_proportion(each, length) for each in value)
    if not isinstance(value, torch.SymInt):
        return not isinstance(value, torch.SymBool | torch.SymFloat)
    return length not in _symbols(value) or length not in sympy.simplify(expression(value) / length).free_symbols


def expression(value: Any) -> Any:
    """Return a number as an expression of symbols."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


def _symbols(size: torch.SymInt) -> set[Any]:
    return set(expression(size).free_symbols)
