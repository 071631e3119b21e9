"""Matrices cut by inputs: each rank's product is a term of the sum over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from partool_runtime import deferral
from partool_runtime.model.projection import Projection
from partool_runtime.parallel.tensor.ops import Team, by_rank, reduce_from_tp, start_tokens, tokens
from partool_runtime.parallel.tensor.symmetric import symmetric_row
from partool_runtime.torch_internals.collectives import finished, start_scatter_sum, start_sum


class RowParallel:
    """:class:`~partool_runtime.model.projection.OutputProduct` of projections of which each rank holds some columns."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def __call__(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Return :func:`row`."""
        return row(x, projection, self.team)


def row(x_BSI: torch.Tensor, projection: Projection, team: Team) -> torch.Tensor:
    """Return the product with a matrix whose columns are distributed over ranks, summed over ranks, plus the bias.

    The result is the residual stream: all tokens ``[B, S, H]``, or this rank's share of the tokens.
    """
    apart = torch.compiler.is_compiling() or deferral.is_splitting()
    matrix_HI = projection.matrix
    if matrix_HI is not None and team.symmetric and not apart:
        out = symmetric_row(x_BSI, matrix_HI, team)
    elif matrix_HI is not None and team.chunks > 1 and not torch.compiler.is_compiling():
        out = _in_pieces(x_BSI, matrix_HI, team)
    else:
        product = projection.product(x_BSI, biased=False)
        out = reduce_from_tp(product, team, fresh=not deferral.is_splitting())
    return out if projection.bias is None else out + projection.bias


def _in_pieces(x_BSI: torch.Tensor, weight_HI: torch.Tensor, team: Team) -> torch.Tensor:
    """Compute :func:`row` in pieces of the tokens; one piece's sum is in flight while the next piece is multiplied.

    Products and sums are two autograd functions: recomputation stops after the last saved tensor and so skips the sums.
    """
    promised: torch.Tensor = _Promised.apply(x_BSI, weight_HI)  # type: ignore[no-untyped-call]
    out: torch.Tensor = _Pieces.apply(promised, x_BSI.detach(), weight_HI.detach(), team)  # type: ignore[no-untyped-call]
    return out


class _Promised(torch.autograd.Function):
    """Placeholder for the product that :class:`_Pieces` computes; its backward pass is the product's."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BSI: torch.Tensor, weight_HI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_BSI, weight_HI)
        # A reference to the parameter itself: deferred gradients are added to it, and an unpacked tensor may be a copy.
        ctx.weight, ctx.splits = weight_HI, deferral.is_splitting()  # type: ignore[attr-defined]
        return x_BSI.new_zeros(()).expand(*x_BSI.shape[:-1], weight_HI.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_BSI, weight_HI = ctx.saved_tensors
        grad_x_BSI = grad_BSH @ weight_HI if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x_BSI, None
        later = partial(deferral.add_gradients, ctx.weight, None, x_BSI.detach(), grad_BSH)
        if ctx.splits and ctx.weight.is_leaf and deferral.defer(later):
            return grad_x_BSI, None
        return grad_x_BSI, deferral.of_weight(x_BSI, grad_BSH)


class _Pieces(torch.autograd.Function):
    """Products and their sums over ranks; the backward pass gathers the gradient if ranks hold shares of the tokens."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, promised: torch.Tensor, x_BSI: torch.Tensor, weight_HI: torch.Tensor, team: Team
    ) -> torch.Tensor:
        ctx.team = team  # type: ignore[attr-defined]
        if team.length is None:
            x_TI = x_BSI.flatten(0, 1)
            parts = x_TI.chunk(team.chunks)
            sums = [start_sum(F.linear(part, weight_HI), team.group_name, in_place=True) for part in parts]
            return torch.cat([finished(part) for part in sums]).view(promised.shape)
        # Each piece has tokens of every rank's share, since each rank gets a part of every piece's sum.
        parts = by_rank(x_BSI, team).transpose(0, 1).chunk(team.chunks, dim=2)
        products = (F.linear(part, weight_HI).flatten(0, 1) for part in parts)
        sums = [start_scatter_sum(product, team.ranks, team.group_name) for product in products]
        return torch.cat([finished(part) for part in sums], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        team: Team = ctx.team
        return grad if team.length is None else tokens(start_tokens(grad, team), team), None, None, None
