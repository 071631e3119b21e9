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


def computed(
    node: fx.Node, find: Callable[[fx.Node], Any], constant: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return the result of a node, given a function that returns the values of the nodes that it reads.

    ``constant`` returns what stands for a constant among the node's arguments.
    """

    def value(argument: Any) -> Any:
        return find(argument) if isinstance(argument, fx.Node) else constant(argument)

    args = cast("tuple[Any, ...]", fx.node.map_aggregate(node.args, value))
    kwargs = cast("dict[str, Any]", fx.node.map_aggregate(node.kwargs, value))
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


def expression(value: Any) -> Any:
    """Return a number as an expression of symbols."""
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


class Number:
    """Computes a number, or a shape, of a graph from the numbers of sequences and tokens."""

    def __init__(self, value: Any, batch: Any, length: Any) -> None:
        """``value`` is the node's example value, ``batch`` and ``length`` are the symbols."""
        self._value, self._symbols = value, (batch, length)
        self._values: dict[tuple[int, int], Any] = {}

    def __call__(self, batch: int, length: int) -> Any:
        """Return the number, or the shape, for so many sequences and tokens."""
        if (batch, length) not in self._values:
            self._values[batch, length] = self._of(self._value, dict(zip(self._symbols, (batch, length), strict=True)))
        return self._values[batch, length]

    def _of(self, value: Any, numbers: dict[Any, int]) -> Any:
        if isinstance(value, tuple):
            items = [self._of(each, numbers) for each in value]
            return torch.Size(items) if isinstance(value, torch.Size) else tuple(items)
        formula = expression(value)
        if not isinstance(formula, sympy.Basic):
            return formula
        number = formula.subs(numbers)
        if number.free_symbols:
            raise ValueError(f"{formula} depends on more than the numbers of sequences and tokens")
        return bool(number) if isinstance(value, torch.SymBool) else _plain(number)


def in_proportion(value: Any, length: Any) -> bool:
    """Return True if numbers are in proportion to the number of tokens, or do not depend on it."""
    if isinstance(value, tuple):
        return all(in_proportion(each, length) for each in value)
    formula = expression(value)
    if not isinstance(formula, sympy.Basic) or length not in formula.free_symbols:
        return True
    return isinstance(value, torch.SymInt) and length not in sympy.simplify(formula / length).free_symbols


def _plain(number: Any) -> int | float:
    return int(number) if number.is_integer else float(number)


def _symbols(size: torch.SymInt) -> set[Any]:
    return set(expression(size).free_symbols)
