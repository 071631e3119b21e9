"""Calls of operators that go past torch's dispatcher, where nothing but the host's time depends on it.

``torch.library`` leads every call of an operator through several layers of Python, of which a plain
:class:`torch.autograd.Function` needs none. Operators remain what compilers, traces and tensors other than plain ones
see. A ``TorchDispatchMode`` over plain tensors sees what an implementation is made of, and not the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.func import debug_unwrap

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def plain(*values: object) -> bool:
    """Tell whether an operator's arguments may be given to its implementation itself.

    Every tensor among them has to be exactly a :class:`torch.Tensor` or a parameter: not fake, functional, of torch's
    distributed tensors, or wrapped by a transform of ``torch.func``; and nothing is being compiled or exported.
    """
    if torch.compiler.is_compiling():
        return False
    for value in values:
        if isinstance(value, torch.Tensor) and (type(value) not in _PLAIN or debug_unwrap(value) is not value):
            return False
    return True


class Parts(NamedTuple):
    """What an operator is made of."""

    compute: Callable[..., Any]
    """Its implementation, which makes new tensors and changes none."""
    keep: Callable[[Any, tuple[Any, ...], Any], None]
    """Its ``setup_context``."""
    gradients: Callable[..., Any]
    """Its backward pass."""


def direct(name: str, parts: Parts) -> Callable[..., Any]:
    """Return ``partool::name``, which has to be registered, as a function that goes past the dispatcher where it may.

    Results, what is saved for the backward pass, and gradients are the same. Profiles show the name of the operator,
    and of its backward pass ``partool::nameBackward``, where gradients are wanted. Second derivatives are as
    ``parts.gradients`` has them: where that calls :func:`direct_backward`, as the operator of the backward pass has.
    """
    compute, keep, gradients = parts
    operator = getattr(torch.ops.partool, name).default

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = compute(*inputs)
        keep(ctx, inputs, output)
        return output

    # Profilers name a call after its class, which a class statement cannot name like an operator. Context and inputs
    # come together: torch takes several times as long where setup_context is separate.
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
    """Return the operator ``partool::name``, of a backward pass, in the same way.

    Where its result would have to be differentiated it is the operator that can, or that refuses to.
    """
    operator = getattr(torch.ops.partool, name).default

    def call(*inputs: Any) -> Any:
        return (operator if torch.is_grad_enabled() or not plain(*inputs) else compute)(*inputs)

    return call
