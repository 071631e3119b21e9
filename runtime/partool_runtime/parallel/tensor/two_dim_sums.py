"""Sums and gathers of two-dimensional tensor parallelism that are not fused with a product (ATP, arXiv 2301.08658).

:mod:`partool_runtime.parallel.tensor.two_dim_ops` has the products with their communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from partool_runtime.parallel.tensor.two_dim_comm import Grid, by_rank, of_ranks, side_by_side


def copy_to_outer(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, which outer ranks multiply by different matrices; its gradient is summed over the outer axis."""
    out: torch.Tensor = _CopyToOuter.apply(grid, x)  # type: ignore[no-untyped-call]
    return out


def summed_over_inner(grid: Grid, products: Sequence[torch.Tensor], *, deal: bool) -> tuple[torch.Tensor, ...]:
    """Sum products ``[B, S, X/d1]`` over the inner axis; with ``deal`` each rank gets its part of every sum's widths.

    Together with :func:`copy_to_outer` this is ``first_products`` for products of any kind.
    """
    out: tuple[torch.Tensor, ...] = _SummedOverInner.apply(grid, deal, *products)  # type: ignore[no-untyped-call]
    return out


def gathered_of_inner(grid: Grid, x_BSX: torch.Tensor, *, dealt: bool) -> torch.Tensor:
    """Return the input of a second product; with ``dealt`` it is gathered from the inner ranks.

    Inner ranks use it for different outputs, so its gradient is summed over the inner axis.
    """
    out: torch.Tensor = _GatheredOfInner.apply(grid, dealt, x_BSX)  # type: ignore[no-untyped-call]
    return out


def inner_sum(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """Sum over the inner axis, for example for norms; each inner rank uses the sum for different widths."""
    out: torch.Tensor = _InnerSum.apply(grid, x)  # type: ignore[no-untyped-call]
    return out


def outer_sum(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """Sum over the outer axis; its ranks all compute the same from the sum, so their gradients of the sum are equal."""
    out: torch.Tensor = _OuterSum.apply(grid, x)  # type: ignore[no-untyped-call]
    return out


def gathered_hidden(grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    """Gather a hidden state ``[B, S, H/d2]`` to ``[B, S, H]``, from which every rank computes its part of the logits.

    The backward pass sums the gradients of all ranks.
    """
    out: torch.Tensor = _GatheredHidden.apply(grid, x_BSH)  # type: ignore[no-untyped-call]
    return out


def dealt_rows(grid: Grid, partial_BSH: torch.Tensor) -> torch.Tensor:
    """Sum ``[B, S, H]`` over all ranks and keep this rank's widths, ``[B, S, H/d2]``.

    This reverses :func:`gathered_hidden`. It is used for the lookup in a tied embedding, whose rows are cut over all
    ranks.
    """
    out: torch.Tensor = _DealtRows.apply(grid, partial_BSH)  # type: ignore[no-untyped-call]
    return out


class _CopyToOuter(torch.autograd.Function):
    """:func:`copy_to_outer`."""

    @staticmethod
    def forward(ctx: FunctionCtx, grid: Grid, x: torch.Tensor) -> torch.Tensor:
        ctx.grid = grid  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, ctx.grid.outer.start_sum(grad)()


class _SummedOverInner(torch.autograd.Function):
    """:func:`summed_over_inner`; inner ranks that have the whole sums have equal gradients of them."""

    @staticmethod
    def forward(ctx: FunctionCtx, grid: Grid, deal: bool, *products: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.grid, ctx.deal = grid, deal  # type: ignore[attr-defined]
        shares = grid.inner.size if deal else 1
        widths = [product.shape[-1] // shares for product in products]
        flat_TX = [product.flatten(0, -2) for product in products]
        if deal:
            sums_TX = grid.inner.start_scatter(by_rank(flat_TX, grid.inner.size))()
        else:
            sums_TX = grid.inner.start_sum(side_by_side(flat_TX))()
        parts_TX = torch.split(sums_TX, widths, dim=-1)
        return tuple(part_TX.reshape(*products[0].shape[:-1], -1) for part_TX in parts_TX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if not ctx.deal:
            return None, None, *grads
        flat_TX = [grad.flatten(0, -2) for grad in grads]
        widths = [grad_TX.shape[-1] for grad_TX in flat_TX]
        parts_TX = of_ranks(ctx.grid.inner.start_gather(side_by_side(flat_TX))(), widths)
        return None, None, *(part_TX.view(*grads[0].shape[:-1], -1) for part_TX in parts_TX)


class _GatheredOfInner(torch.autograd.Function):
    """:func:`gathered_of_inner`."""

    @staticmethod
    def forward(ctx: FunctionCtx, grid: Grid, dealt: bool, x_BSX: torch.Tensor) -> torch.Tensor:
        ctx.grid, ctx.dealt = grid, dealt  # type: ignore[attr-defined]
        return _gathered_widths(grid, x_BSX) if dealt else x_BSX.view_as(x_BSX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSX: torch.Tensor) -> tuple[Any, ...]:
        if not ctx.dealt:
            return None, None, ctx.grid.inner.start_sum(grad_BSX)()
        dealt_TX = ctx.grid.inner.start_scatter(by_rank([grad_BSX.flatten(0, -2)], ctx.grid.inner.size))()
        return None, None, dealt_TX.view(*grad_BSX.shape[:-1], -1)


class _InnerSum(torch.autograd.Function):
    """:func:`inner_sum`; as the ranks use the sum for different widths, the backward pass sums their gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, grid: Grid, x: torch.Tensor) -> torch.Tensor:
        ctx.grid = grid  # type: ignore[attr-defined]
        return grid.inner.start_sum(x)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, ctx.grid.inner.start_sum(grad)()


class _OuterSum(torch.autograd.Function):
    """:func:`outer_sum`."""

    @staticmethod
    def forward(ctx: FunctionCtx, grid: Grid, x: torch.Tensor) -> torch.Tensor:
        return grid.outer.start_sum(x)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, grad


class _GatheredHidden(torch.autograd.Function):
    """:func:`gathered_hidden`."""

    @staticmethod
    def forward(ctx: FunctionCtx, grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
        ctx.grid = grid  # type: ignore[attr-defined]
        return _gathered_widths(grid, x_BSH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[Any, ...]:
        return None, _summed_and_dealt(ctx.grid, grad_BSH)


class _DealtRows(torch.autograd.Function):
    """:func:`dealt_rows`."""

    @staticmethod
    def forward(ctx: FunctionCtx, grid: Grid, partial_BSH: torch.Tensor) -> torch.Tensor:
        ctx.grid = grid  # type: ignore[attr-defined]
        return _summed_and_dealt(grid, partial_BSH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[Any, ...]:
        return None, _gathered_widths(ctx.grid, grad_BSH)


def _gathered_widths(grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    x_TH = x_BSH.flatten(0, -2)
    return of_ranks(grid.inner.start_gather(x_TH)(), [x_TH.shape[1]])[0].view(*x_BSH.shape[:-1], -1)


def _summed_and_dealt(grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    dealt_TH = grid.inner.start_scatter(by_rank([x_BSH.flatten(0, -2)], grid.inner.size))()
    # The near ranks reduce-scatter first, so that the sum over the far ranks has 1/d2 of the size.
    return grid.outer.start_sum(dealt_TH)().view(*x_BSH.shape[:-1], -1)
