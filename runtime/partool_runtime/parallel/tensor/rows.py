"""Matrices cut by inputs: each rank's product is a part of the sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from partool_runtime import deferral
from partool_runtime.parallel.tensor.ops import Team, by_rank, left
from partool_runtime.torch_internals import finished, start_gather, start_scatter_sum, start_sum


def row(x_BSI: torch.Tensor, linear: nn.Linear, team: Team) -> torch.Tensor:
    """Return the sum over ranks of the products with their columns of a matrix, plus its bias, which all ranks hold.

    The result is the residual stream as the ranks hold it, ``[B, S, H]`` or a share of the tokens.
    """
    if team.chunks == 1 or torch.compiler.is_compiling():
        product = deferral.linear(x_BSI, linear.weight)
        out = left(product, team, fresh=not deferral.is_splitting())
    else:
        out = _in_pieces(x_BSI, linear.weight, team)
    return out if linear.bias is None else out + linear.bias


def _in_pieces(x_BSI: torch.Tensor, weight_HI: torch.Tensor, team: Team) -> torch.Tensor:
    """Do as :func:`row` does in pieces of the tokens: the sum of one travels while the next is multiplied."""
    if team.length is None:
        x_TI = x_BSI.flatten(0, 1)
        parts = x_TI.tensor_split(min(team.chunks, x_TI.shape[0]))
    else:
        # Of every rank's share the same tokens, since each rank gets a part of every piece's sum.
        parts = by_rank(x_BSI, team).tensor_split(min(team.chunks, team.share), dim=2)
    products, sums = [], []
    for part in parts:
        products.append(deferral.linear(part, weight_HI))
        sums.append(_start(products[-1].detach(), team))
    out: torch.Tensor = _Joined.apply(team, sums, *products)  # type: ignore[no-untyped-call]
    return out if team.length is not None else out.view(*x_BSI.shape[:2], -1)


def _start(product: torch.Tensor, team: Team) -> torch.Tensor:
    """Begin the sum of a piece, ``[T', H]``, or of ``[B, ranks, s', H]`` tokens of shares, which makes ``[B, s', H]``.

    The product itself is never looked at, nor are its values in the backward pass, so it may become the sum.
    """
    if team.length is None:
        return start_sum(product, team.group_name, in_place=not deferral.is_splitting())
    return start_scatter_sum(product.transpose(0, 1).flatten(0, 1), team.ranks, team.group_name)


class _Joined(torch.autograd.Function):
    """Waits for the sums of all pieces, in their order; backward hands each product its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, team: Team, sums: list[torch.Tensor], *products: torch.Tensor) -> torch.Tensor:
        dim = 0 if team.length is None else 1
        ctx.team, ctx.sizes = team, [part.shape[dim] for part in sums]  # type: ignore[attr-defined]
        return torch.cat([finished(part) for part in sums], dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        team: Team = ctx.team
        if team.length is None:
            return None, None, *torch.split(grad, ctx.sizes)
        of_ranks = finished(start_gather(grad, team.ranks, team.group_name)).view(team.ranks, *grad.shape)
        return None, None, *torch.split(of_ranks.transpose(0, 1), ctx.sizes, dim=2)
