"""What the rewriting knows of torch's functions: which take sizes, write into tensors, allocate, or draw numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from torch import fx

_FILLED = {"full": 1, "new_full": 2}
"""Function that fills a new tensor with a number → position of that number."""
_NEW = frozenset({"zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"})
_SIZES = _NEW | frozenset({
    "view", "reshape", "expand", "unflatten", "repeat", "tile", "broadcast_to", "split", "Size", "rand", "randn",
})  # fmt: skip
"""Functions whose numbers are sizes. Other functions compute with numbers."""
_WRITING = frozenset({"setitem", *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))})
_WRITING |= {f"i{name}" for name in ("and", "or", "xor", "lshift", "rshift", "matmul")}
"""Operators of Python that change their first argument."""
_DRAWING = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "multinomial", "normal", "normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_",
    "poisson", "rrelu", "gumbel_softmax",
})  # fmt: skip
_DROPPING = ("dropout", "alpha_dropout")
"""Endings of functions that draw numbers where their share ``p`` is above 0 and they train."""


def name_of(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls, without its module."""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def takes_sizes(node: fx.Node) -> bool:
    """Return True if the numbers that a node takes are sizes of tensors."""
    return name_of(node) in _SIZES


def allocates(node: fx.Node) -> bool:
    """Return True if a node makes a tensor whose elements are all alike, and known when the graph is made."""
    return name_of(node) in _NEW and not isinstance(fill_of(node), fx.Node)


def fill_of(node: fx.Node) -> Any:
    """Return the number with which a node fills a new tensor; None if it does not say."""
    at = _FILLED.get(name_of(node))
    if at is None:
        return None
    return node.args[at] if len(node.args) > at else node.kwargs.get("fill_value")


def written(node: fx.Node) -> fx.Node | None:
    """Return the node whose tensor a node changes in place; None if it changes none."""
    name = name_of(node)
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        changes = name in _WRITING
    else:
        changes = (name.endswith("_") and not name.endswith("__")) or arguments(node).get("inplace") is True
    first = node.kwargs.get("out", node.args[0] if changes and node.args else None)
    return first if isinstance(first, fx.Node) else None


def draws(node: fx.Node) -> bool:
    """Return True if a node draws random numbers."""
    name = name_of(node).rstrip("_")
    if name.startswith(_DROPPING) or name.endswith(_DROPPING):
        given = arguments(node)
        return given.get("p", 0.5) != 0.0 and given.get("training", given.get("train", True)) is not False
    return name_of(node) in _DRAWING or (name == "scaled_dot_product_attention" and _share_dropped(node) != 0.0)


def _share_dropped(node: fx.Node) -> Any:
    return node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by name, if its function is one of Python's; else those that are given by name."""
    names = _parameters(cast("Callable[..., Any]", node.target)) if node.op == "call_function" else ()
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # functions of C++ do not tell
        return ()
