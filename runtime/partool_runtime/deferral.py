"""Deferred weight gradients, which a backward pass leaves to be computed later.

Pipelines that split their backward passes (Qi et al., arXiv 2401.10241) compute the gradients of inputs first and the
gradients of weights in otherwise idle time. A matrix product inside :func:`splitting` keeps the tensors that its
weight's gradient needs; inside :func:`collecting` its backward pass defers the weight's gradient.

Whether products are split or collected is stored per process, not per thread, because on a GPU backward passes run on
a separate thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

Work = Callable[[], None]


class _State:
    splitting = False
    sink: list[Work] | None = None


@contextmanager
def splitting() -> Iterator[None]:
    """Within this context :func:`linear` keeps the tensors that it needs to compute its weight gradient later."""
    before, _State.splitting = _State.splitting, True
    try:
        yield
    finally:
        _State.splitting = before


@contextmanager
def undivided() -> Iterator[None]:
    """Within this context :func:`linear` defers nothing, since its tensors must not be kept until later."""
    before, _State.splitting = _State.splitting, False
    try:
        yield
    finally:
        _State.splitting = before


def is_splitting() -> bool:
    """Return whether products keep the tensors for deferred weight gradients."""
    return _State.splitting


@contextmanager
def collecting(sink: list[Work]) -> Iterator[None]:
    """Within this context, collect in ``sink`` the work that backward passes defer."""
    before, _State.sink = _State.sink, sink
    try:
        yield
    finally:
        _State.sink = before


def defer(work: Work) -> bool:
    """Defer work of a backward pass; outside of :func:`collecting` return False, so that the caller does the work."""
    if _State.sink is None:
        return False
    _State.sink.append(work)
    return True


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` like ``F.linear``; its weight gradient may be deferred in :func:`splitting`."""
    if _State.splitting and torch.is_grad_enabled() and weight.requires_grad:
        out: torch.Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out
    return F.linear(x, weight, bias)


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add ``gradient`` to a parameter's ``grad``, as a backward pass would."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward pass can defer the gradients of weight and bias."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # The parameter objects themselves: later gradients are added to these, independent of saved-tensor hooks.
        ctx.weight, ctx.bias = weight, bias  # type: ignore[attr-defined]
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        needs_weight, needs_bias = ctx.needs_input_grad[1:]
        # Detached, so that deferred work does not keep the graph that made x alive.
        later = partial(add_gradients, ctx.weight, ctx.bias if needs_bias else None, x.detach(), grad.detach())
        if not weight.is_leaf or not defer(later):
            return grad_x, of_weight(x, grad) if needs_weight else None, of_bias(grad) if needs_bias else None
        return grad_x, None, None


def add_gradients(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, grad: torch.Tensor) -> None:
    """Compute the gradients of weight and bias of ``x @ weight.T + bias`` and add them to the parameters' ``grad``."""
    add_gradient(weight, of_weight(x, grad))
    if bias is not None:
        add_gradient(bias, of_bias(grad))


def of_weight(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the weight ``[O, I]`` of ``x @ weight.T``."""
    return _rows(grad).T @ _rows(x)


def of_bias(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a bias that was added to every row."""
    return _rows(grad).sum(0)


def _rows(x: torch.Tensor) -> torch.Tensor:
    # reshape(-1, width) cannot compute the number of rows if the width is 0.
    return x.flatten(0, -2) if x.ndim > 1 else x[None]
