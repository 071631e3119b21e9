"""Checks that a model's code mixes tokens in attention only.

Each node that depends on tokens runs once on tensors without memory, whose shapes hold the number of tokens as a
symbol, and each operator of torch that it calls must be known to keep tokens apart: its reduced, sorted or sliced
dimensions are not those of tokens. Operators without a rule are refused, so that no model is sharded by mistake.

A view may merge the tokens with other dimensions, and take them apart in another order. So each tensor has a *stride*:
how many elements of its dimension of tokens belong to one token in a row. It is 1 for ``[B, S, H]`` and ``[B·S, H]``,
B for ``[S·B, H]``. Whether a view keeps tokens together is found with small sizes.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import fx

from partool_runtime.graph.attention import ATTENTION
from partool_runtime.graph.capture import Captured, CaptureError, call_experts, where
from partool_runtime.graph.nodes import Number, computed, expression, tensors_in, token_dims, value_of
from partool_runtime.graph.share import shares_of
from partool_runtime.torch_internals.tracing import OperatorMode, context_of

_SHAPES = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand",
    "alias", "detach", "clone", "_to_copy", "copy", "lift_fresh", "zeros_like", "ones_like", "empty_like", "full_like",
    "rand_like", "randn_like", "bernoulli", "native_dropout", "new_zeros", "new_ones", "new_empty", "new_full",
    "embedding", "empty_permuted", "view_as_complex", "view_as_real",
})  # fmt: skip
"""Operators that move no value between tokens if the result has one dimension of tokens."""
_ALONG = frozenset({
    "_softmax", "_log_softmax", "sum", "mean", "var", "std", "var_mean", "amax", "amin", "max", "min", "topk", "sort",
    "argmax", "argmin", "argsort", "cumsum", "cumprod", "gather", "scatter", "scatter_add", "scatter_reduce",
    "index_select", "linalg_vector_norm", "logsumexp", "prod", "select", "split", "split_with_sizes", "unbind", "cat",
    "stack", "flip", "roll", "any", "all", "unsafe_split", "glu",
})  # fmt: skip
"""Operators that work along the dimensions ``dim``, and on all dimensions if ``dim`` is not given."""
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})
"""Operators that may merge dimensions, and take merged ones apart."""
_SEQUENCES, _TOKENS = 2, 5
"""Small sizes at which views are checked; neither divides the other."""
_CONTRACTED = {
    "mm": ((0, 1), (1, 0)),
    "bmm": ((0, 2), (1, 1)),
    "addmm": ((1, 1), (2, 0)),
    "baddbmm": ((1, 2), (2, 1)),
    "mv": ((0, 1), (1, 0)),
}
"""Matrix product → (argument, dimension of it) of the dimensions that are summed over."""
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})


def check_tokenwise(captured: Captured) -> None:
    """Raise :class:`CaptureError` if a node other than attention and experts may mix tokens."""
    strides: dict[int, int] = {}
    """Stride of the tensors that nodes have as example values, by identity; 1 where there is none."""
    for node in sorted_shares(captured):
        if node.op == "output" or node.target in ATTENTION or node.target is call_experts:
            continue
        values = [value_of(each) for each in node.all_input_nodes]
        if node.target is operator.getitem and not isinstance(values[0], torch.Tensor):
            continue  # an item of a tuple is the same tensor
        context = next(filter(None, map(context_of, tensors_in(values))), None)
        if context is None:
            continue
        watch = _Watch(captured, strides)
        try:
            with context, torch.no_grad(), watch:
                out = computed(node, value_of)
        except _MixesError as error:
            raise CaptureError(f"its code may mix tokens outside of attention: {error}{where(node)}") from None
        for made, example in zip(tensors_in(out), tensors_in(value_of(node)), strict=False):
            strides[id(example)] = watch.stride(made)


def sorted_shares(captured: Captured) -> list[fx.Node]:
    """Return the nodes that depend on tokens, in the order of the graph, without the tokens themselves."""
    shares = shares_of(captured)
    return [node for node in captured.graph.nodes if node in shares and node is not captured.tokens]


class _MixesError(Exception):
    """An operator may mix tokens; the text names it."""


class _Watch(OperatorMode):  # type: ignore[no-untyped-call]
    """Raises :class:`_MixesError` at the first operator that may mix tokens."""

    def __init__(self, captured: Captured, strides: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length, self.batch = captured.length, captured.batch
        self._before, self._made = strides, dict[int, tuple[torch.Tensor, int]]()

    def stride(self, tensor: torch.Tensor) -> int:
        """Return how many elements of a tensor's dimension of tokens belong to one token in a row."""
        made = self._made.get(id(tensor))  # the tensor is kept, so that its identity stays its own
        return self._before.get(id(tensor), 1) if made is None else made[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = [token_dims(tensor, self.length) for tensor in tensors_in((args, kwargs))]
        out = func(*args, **kwargs)
        if any(before) and any(True for _ in tensors_in(out)):
            name = func.overloadpacket.__name__.rstrip("_")
            why = self._why(func, name, args, kwargs) or self._of_results(out)
            if not why:
                why = self._of_strides(name, args, kwargs, out)
            if why:
                raise _MixesError(why if why.startswith("partool") else f"{name} {why}")
        return out

    def _of_strides(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> str:
        """Record the strides of results; return why tokens do not stay together, empty if they do."""
        given = [each for each in tensors_in((args, kwargs)) if token_dims(each, self.length)]
        strides = {self.stride(each) for each in given}
        if len(strides) > 1:
            return "joins tensors whose tokens are in different orders"
        (stride,) = strides
        for result in tensors_in(out):
            row_stride: int | None = stride
            if name in _VIEWS:
                row_stride = self._viewed(given[0], stride, result)
            elif expression(result.shape[token_dims(result, self.length)[0]]) == self.length:
                row_stride = 1
            if row_stride is None:
                return "takes tokens apart in another order than they are in"
            self._made[id(result)] = result, row_stride
        return ""

    def _viewed(self, tensor: torch.Tensor, stride: int, result: torch.Tensor) -> int | None:
        """Return the stride of a view; None if its dimension of tokens does not number them."""
        before, after = self._small(tensor), self._small(result)
        (dim,), (seen,) = token_dims(tensor, self.length), token_dims(result, self.length)
        places = np.arange(before[dim]) // stride % _TOKENS
        shape = [1] * len(before)
        shape[dim] = before[dim]
        viewed = np.moveaxis(np.broadcast_to(places.reshape(shape), before).reshape(after), seen, 0)
        numbers = viewed.reshape(after[seen], -1)
        if numbers.shape[1] == 0 or not (numbers == numbers[:, :1]).all():
            return None
        divisors = (each for each in range(1, after[seen] // _TOKENS + 1) if after[seen] % (each * _TOKENS) == 0)
        return next((n for n in divisors if (np.arange(after[seen]) // n % _TOKENS == numbers[:, 0]).all()), None)

    def _small(self, tensor: torch.Tensor) -> list[int]:
        """Return a tensor's shape for few sequences of few tokens, and with at most few of all else."""
        return [Number(size, self.batch, self.length)(_SEQUENCES, _TOKENS) for size in tensor.shape]

    def _of_results(self, out: Any) -> str:
        for tensor in tensors_in(out):
            count = len(token_dims(tensor, self.length))
            if count != 1:
                return "has a result of no token" if count == 0 else "has a result of pairs of tokens"
        return ""

    def _why(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why an operator may mix tokens; empty if it keeps them apart."""
        if torch.Tag.pointwise in func.tags or (name in _SHAPES and name != "embedding"):
            return ""
        if name in _CONTRACTED:
            summed = [dim in token_dims(args[at], self.length) for at, dim in _CONTRACTED[name]]
            return "sums over tokens" if any(summed) else ""
        arguments = _named(func, args, kwargs)
        first = next(tensors_in((args, kwargs)))
        if name == "embedding":
            if token_dims(args[0], self.length):
                return "looks up rows of a table of tokens"
            return "divides gradients by how often a token occurs" if arguments["scale_grad_by_freq"] else ""
        if name in _NORMS:
            normal = range(first.dim() - len(arguments["normalized_shape"]), first.dim())
            return "normalises over tokens" if set(normal) & set(token_dims(first, self.length)) else ""
        if name == "slice":
            return self._of_slice(first, arguments)
        if name in _ALONG:
            return self._along(arguments)
        if name == "index":
            return self._of_index(first, arguments["indices"])
        return f"partool does not know whether {name} keeps tokens apart"

    def _along(self, arguments: dict[str, Any]) -> str:
        dims = arguments.get("dim", arguments.get("dims"))
        for tensor in tensors_in(tuple(arguments.values())):
            every = range(tensor.dim())
            asked = every if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
            along = {dim % tensor.dim() for dim in asked} if tensor.dim() else set()
            if along & set(token_dims(tensor, self.length)):
                return "works along the tokens"
        sizes = {
            str(tensor.shape[dim])
            for tensor in tensors_in(tuple(arguments.values()))
            for dim in token_dims(tensor, self.length)
        }
        return "takes some of the tokens" if len(sizes) > 1 else ""

    def _of_slice(self, tensor: torch.Tensor, arguments: dict[str, Any]) -> str:
        dim = (arguments.get("dim") or 0) % tensor.dim()
        if dim not in token_dims(tensor, self.length):
            return ""
        size, start, end = tensor.shape[dim], arguments.get("start") or 0, arguments.get("end")
        all_tokens = start == 0 and (end is None or _same(end, size) or (isinstance(end, int) and end > 2**60))
        return "" if all_tokens and (arguments.get("step") or 1) == 1 else "takes some of the tokens"

    def _of_index(self, tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> str:
        at = 0
        for index in indices:
            width = index.dim() if index is not None and index.dtype == torch.bool else 1
            if index is not None and set(range(at, at + width)) & set(token_dims(tensor, self.length)):
                return "picks tokens"
            at += width
        return ""


def _same(one: Any, other: Any) -> bool:
    """Return True if two sizes are the same expression, without deciding it for the example."""
    return bool(expression(one) == expression(other))


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operator by name, with the defaults of those that are not given."""
    arguments = func._schema.arguments
    usual = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return usual | dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
