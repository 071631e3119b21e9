"""Operator calls that bypass torch's dispatcher where the only effect of the bypass is saved host time.

``torch.library`` sends every call of an operator through several layers of Python, which a call of
:class:`torch.autograd.Function` does not need. Compilers, traces and tensor subclasses still see the operator. For
tensors of no subclass, a ``TorchDispatchMode`` sees the operators that the implementation calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.func import debug_unwrap

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def plain(*values: object) -> bool:
    """Return whether an operator's arguments may be passed directly to its implementation.

    Every tensor among the arguments has to be exactly a :class:`torch.Tensor` or a parameter: not fake, functional,
    distributed (DTensor), or wrapped by a transform of ``torch.func``. The call must not be part of compiling or
    exporting.
    """
    if torch.compiler.is_compiling():
        return False
    for value in values:
        if isinstance(value, torch.Tensor) and (type(value) not in _PLAIN or debug_unwrap(value) is not value):
            return False
    return True


class Parts(NamedTuple):
    """Functions that make up an operator."""

    compute: Callable[..., Any]
    """Implementation, which makes new tensors and changes none."""
    keep: Callable[[Any, tuple[Any, ...], Any], None]
    """Function ``setup_context`` of the operator."""
    gradients: Callable[..., Any]
    """Backward pass of the operator."""


def direct(name: str, parts: Parts) -> Callable[..., Any]:
    """Return the registered operator ``partool::name`` as a function that bypasses the dispatcher where allowed.

    Results, saved tensors and gradients are those of the operator. Where gradients are needed, profiles show the names
    of the operator and of its backward pass, ``partool::nameBackward``. Second derivatives come from
    ``parts.gradients``; if it calls a function of :func:`direct_backward`, they come from that function's operator.
    """
    compute, keep, gradients = parts
    operator = getattr(torch.ops.partool, name).default

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = compute(*inputs)
        keep(ctx, inputs, output)
        return output

    # Profilers show the class's name; ``type`` gives it the operator's name, which a class statement cannot spell.
    # ``forward`` also saves the inputs: torch takes several times as long with a separate ``setup_context``.
    members = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    function: Any = type(f"partool::{name}", (torch.autograd.Function,), members)

    def call(*inputs: Any) -> Any:
        if not plain(*inputs):
            return operator(*inputs)
        if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
            return function.apply(*inputs)
        return compute(*inputs)

    return call


def direct_backward(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass's operator ``partool::name`` as a function that bypasses the dispatcher where allowed.

    While gradients are enabled, the function calls the operator, which is differentiable or raises an error.
    """
    operator = getattr(torch.ops.partool, name).default

    def call(*inputs: Any) -> Any:
        return (operator if torch.is_grad_enabled() or not plain(*inputs) else compute)(*inputs)

    return call
