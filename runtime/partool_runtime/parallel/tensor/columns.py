"""Matrices that share one input and are cut by their outputs, such as the matrices of queries, keys and values.

The parts of the input's gradient that come from these matrices are added up before a single all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from partool_runtime import deferral
from partool_runtime.fp8 import products
from partool_runtime.model.projection import Projection
from partool_runtime.parallel.tensor.ops import Team, copy_to_tp, start_reduce_from_tp, start_tokens, tokens
from partool_runtime.parallel.tensor.symmetric import symmetric_columns
from partool_runtime.torch_internals.collectives import finished


class ColumnParallel:
    """:class:`~partool_runtime.model.projection.InputProducts` of projections of which each rank holds some rows."""

    joint = True

    def __init__(self, team: Team) -> None:
        self.team = team

    def __call__(self, x: torch.Tensor, projections: Sequence[Projection]) -> tuple[torch.Tensor, ...]:
        """Return :func:`columns`."""
        return columns(x, projections, self.team)

    def copy_to_tp(self, x: torch.Tensor) -> torch.Tensor:
        """Return all tokens; the gradient is summed over the ranks."""
        return copy_to_tp(x, self.team)


def columns(x: torch.Tensor, projections: Sequence[Projection], team: Team) -> tuple[torch.Tensor, ...]:
    """Return the products of one input with this rank's rows of several matrices, each ``[B, S, width]``.

    ``x`` is the residual stream: all tokens ``[B, S, H]``, or this rank's share of the tokens.
    """
    simple = not team.overlap and team.length is None
    # A compiler orders exchanges by itself; deferred weight gradients leave no computation to overlap exchanges with.
    plain = simple or deferral.is_splitting() or torch.compiler.is_compiling()
    weights = [] if plain else [matrix for each in projections if (matrix := each.matrix) is not None]
    if len(weights) < len(projections):
        return products(copy_to_tp(x, team), projections)
    biases = [each.bias for each in projections]
    if team.symmetric:
        return symmetric_columns(x, weights, biases, team)
    out: tuple[torch.Tensor, ...] = _Columns.apply(x, team, *weights, *biases)  # type: ignore[no-untyped-call]
    return out


class _Columns(torch.autograd.Function):
    """Several linear maps of one input.

    Where the ranks hold shares of the tokens, each rank saves only its share. The backward pass all-gathers the tokens
    again while it computes the input's gradient, and reduces the input's gradient while it computes the gradients of
    the weights.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, team: Team, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        half = len(parameters) // 2
        weights = [weight for weight in parameters[:half] if weight is not None]
        ctx.save_for_backward(x, *weights)
        ctx.team = team  # type: ignore[attr-defined]
        full_x = x if team.length is None else tokens(start_tokens(x, team), team)
        return tuple(F.linear(full_x, w, b) for w, b in zip(weights, parameters[half:], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        team: Team = ctx.team
        needs_x, _, *needs = ctx.needs_input_grad
        needs_weight, needs_bias = needs[: len(weights)], needs[len(weights) :]
        gathering = start_tokens(x, team) if team.length is not None and any(needs_weight) else None
        travelling = start_reduce_from_tp(_of_input(grads, weights), team, fresh=True) if needs_x else None
        if travelling is not None and not team.overlap:
            travelling = finished(travelling)
        full_x = x if gathering is None else tokens(gathering, team)
        pairs = list(zip(grads, needs_weight, needs_bias, strict=True))
        of_weights = [deferral.of_weight(full_x, grad) if wanted else None for grad, wanted, _ in pairs]
        of_biases = [deferral.of_bias(grad) if wanted else None for grad, _, wanted in pairs]
        if travelling is not None and team.overlap:
            travelling = finished(travelling)
        return travelling, None, *of_weights, *of_biases


def _of_input(grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return Σ grad @ weight, ``[B, S, H]``."""
    total = grads[0] @ weights[0]
    flat = total.flatten(0, -2)
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        flat.addmm_(grad.flatten(0, -2), weight)
    return total
