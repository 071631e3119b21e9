"""Products of two-dimensional tensor parallelism, each with its communication (ATP, arXiv 2301.08658, column-first).

The tensor ranks form a grid of d1 × d2 ranks with the axes ``outer`` and ``inner``. A hidden state ``[B, S, H/d2]`` is
cut over the inner axis and replicated along the outer one. First products have output widths cut over ``outer`` and
input widths cut over ``inner``, so their results are summed over ``inner``. Second products have output widths cut
over ``inner`` and input widths cut over ``outer``, so their results are summed over ``outer``.

Tokens are processed in pieces: the sum of one piece is in flight while the next piece is multiplied. Backward passes
send the gradient of the input while they compute the gradients of the weights, or they defer the gradients of the
weights (:mod:`partool_runtime.deferral`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from partool_runtime.deferral import add_gradient, defer, of_weight
from partool_runtime.parallel.tensor.two_dim_comm import Grid, Pending, by_rank, of_ranks, side_by_side
from partool_runtime.parallel.tensor.two_dim_sums import outer_sum


def first_products(
    grid: Grid, x_BSH: torch.Tensor, weights: Sequence[torch.Tensor], *, deal: bool
) -> tuple[torch.Tensor, ...]:
    """Multiply a hidden state ``[B, S, H/d2]`` by weights ``[X/d1, H/d2]`` and sum over the inner axis.

    With ``deal`` each inner rank gets its 1/d2 of every sum's widths, ``[B, S, X/(d1·d2)]``; without it all inner ranks
    get ``[B, S, X/d1]``.
    """
    out: tuple[torch.Tensor, ...] = _First.apply(grid, deal, x_BSH, *weights)  # type: ignore[no-untyped-call]
    return out


def second_product(grid: Grid, x_BSX: torch.Tensor, weight_HX: torch.Tensor, *, dealt: bool) -> torch.Tensor:
    """Multiply by a weight ``[H/d2, X/d1]`` and sum over the outer axis, to ``[B, S, H/d2]``.

    ``x_BSX`` is ``[B, S, X/d1]`` and equal on all inner ranks. With ``dealt`` it is ``[B, S, X/(d1·d2)]`` and is
    gathered first.
    """
    out: torch.Tensor = _Second.apply(grid, dealt, x_BSX, weight_HX)  # type: ignore[no-untyped-call]
    # With one piece the sum comes after the last saved tensor, so that full recomputation of a layer skips the
    # layer's last sum.
    return outer_sum(grid, out) if grid.chunks == 1 else out


class _First(torch.autograd.Function):
    """:func:`first_products`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, grid: Grid, deal: bool, x_BSH: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x_BSH, *weights)
        # References to the parameters themselves: deferred gradients are added to these.
        ctx.grid, ctx.deal, ctx.weights = grid, deal, weights  # type: ignore[attr-defined]

        def start(x_TH: torch.Tensor) -> Pending:
            products = [F.linear(x_TH, weight) for weight in weights]
            if deal:
                return grid.inner.start_scatter(by_rank(products, grid.inner.size))
            # A concatenation is not referenced elsewhere; a single product may be saved by recomputation.
            return grid.inner.start_sum(side_by_side(products), in_place=len(products) > 1)

        sums_TX = _joined([start(x_TH) for x_TH in _pieces(x_BSH, grid)])
        shares = grid.inner.size if deal else 1
        widths = [weight.shape[0] // shares for weight in weights]
        return torch.split(sums_TX.view(*x_BSH.shape[:-1], sum(widths)), widths, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x_BSH, *weights = ctx.saved_tensors
        grid, widths = ctx.grid, [grad.shape[-1] for grad in grads]
        pieces = zip(*(_pieces(grad, grid) for grad in grads), strict=True)
        if ctx.deal:
            started = [grid.inner.start_gather(side_by_side(piece)) for piece in pieces]
            grad_pieces: Iterable[Sequence[torch.Tensor]] = (of_ranks(wait(), widths) for wait in started)
        else:
            grad_pieces = pieces
        used, pending = [], []
        for piece in grad_pieces:
            used.append(piece)
            if ctx.needs_input_grad[2]:
                pending.append(grid.outer.start_sum(_sum_of_products(piece, weights), in_place=True))
        grads_TX = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*used, strict=True)]
        finish = partial(_joined, pending) if pending else None
        of_weights = partial(_weight_gradients, x_BSH.detach(), grads_TX, ctx.needs_input_grad[3:])
        grad_TH, grad_weights = _finished(finish, of_weights, ctx.weights, grid)
        return None, None, None if grad_TH is None else grad_TH.view_as(x_BSH), *grad_weights


class _Second(torch.autograd.Function):
    """:func:`second_product`; if there is a single piece, the sum is left to the caller."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, grid: Grid, dealt: bool, x_BSX: torch.Tensor, weight_HX: torch.Tensor
    ) -> torch.Tensor:
        pieces: Iterable[torch.Tensor] = _pieces(x_BSX, grid)
        if dealt:
            started = [grid.inner.start_gather(piece) for piece in pieces]
            pieces = (of_ranks(wait(), [x_BSX.shape[-1]])[0] for wait in started)
        used, pending = [], []
        for x_TX in pieces:
            used.append(x_TX)
            product_TH = F.linear(x_TX, weight_HX)
            pending.append(partial(_same, product_TH) if grid.chunks == 1 else grid.outer.start_sum(product_TH))
        x_TX = (torch.cat(used) if len(used) > 1 else used[0]) if dealt else x_BSX.flatten(0, -2)
        ctx.save_for_backward(x_TX, weight_HX)
        ctx.grid, ctx.dealt, ctx.weight, ctx.shape = grid, dealt, weight_HX, x_BSX.shape  # type: ignore[attr-defined]
        return _joined(pending).view(*x_BSX.shape[:-1], weight_HX.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[Any, ...]:
        x_TX, weight_HX = ctx.saved_tensors
        grid, pending = ctx.grid, []
        for grad_TH in _pieces(grad_BSH, grid) if ctx.needs_input_grad[2] else ():
            grad_TX = grad_TH @ weight_HX
            if ctx.dealt:
                pending.append(grid.inner.start_scatter(by_rank([grad_TX], grid.inner.size)))
            else:
                pending.append(grid.inner.start_sum(grad_TX, in_place=True))
        finish = partial(_joined, pending) if pending else None
        of_weights = partial(_weight_gradients, x_TX.detach(), [grad_BSH.flatten(0, -2)], ctx.needs_input_grad[3:])
        grad_TX, grad_weights = _finished(finish, of_weights, (ctx.weight,), grid)
        return None, None, None if grad_TX is None else grad_TX.view(ctx.shape), *grad_weights


def _finished(
    finish: Callable[[], torch.Tensor] | None,
    of_weights: Callable[[], list[torch.Tensor | None]],
    weights: Sequence[torch.Tensor],
    grid: Grid,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return the gradients of input and weights; ``overlap`` computes weight gradients while the input's is sent."""
    grad = finish() if finish is not None and not grid.overlap else None
    put_off = all(weight.is_leaf for weight in weights) and defer(partial(_add, weights, of_weights))
    grad_weights: list[torch.Tensor | None] = [None] * len(weights) if put_off else of_weights()
    return finish() if finish is not None and grid.overlap else grad, grad_weights


def _add(weights: Sequence[torch.Tensor], of_weights: Callable[[], list[torch.Tensor | None]]) -> None:
    for weight, gradient in zip(weights, of_weights(), strict=True):
        if gradient is not None:
            add_gradient(weight, gradient)


def _weight_gradients(
    x: torch.Tensor, grads_TX: Sequence[torch.Tensor], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    return [of_weight(x, grad_TX) if need else None for grad_TX, need in zip(grads_TX, needed, strict=True)]


def _sum_of_products(grads_TX: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    total = grads_TX[0] @ weights[0]
    for grad_TX, weight in zip(grads_TX[1:], weights[1:], strict=True):
        total = torch.addmm(total, grad_TX, weight)
    return total


def _pieces(x: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, ...]:
    """Return the tokens of ``[B, S, …]`` in ``grid.chunks`` pieces ``[T, …]``; fewer pieces if there are few tokens."""
    return x.reshape(-1, x.shape[-1]).chunk(grid.chunks)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _joined(pending: Sequence[Pending]) -> torch.Tensor:
    return torch.cat([wait() for wait in pending]) if len(pending) > 1 else pending[0]()
