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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from partool_runtime.deferral import add_gradient, defer, of_weight
from partool_runtime.parallel.tensor.two_dim_comm import Axis, Pending


@dataclass(frozen=True, slots=True)
class Grid:
    """The tensor ranks, and the settings of their communication."""

    outer: Axis
    """Axis of d1 ranks."""
    inner: Axis
    """Axis of d2 ranks, with the fastest links."""
    chunks: int = 1
    """Number of pieces of the tokens."""
    overlap: bool = False
    """Whether gradients of weights are computed while the gradient of the input is in flight."""


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


def entered_of_outer(grid: Grid, x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, which outer ranks multiply by different matrices; its gradient is summed over the outer axis."""
    out: torch.Tensor = _EnteredOfOuter.apply(grid, x)  # type: ignore[no-untyped-call]
    return out


def summed_over_inner(grid: Grid, products: Sequence[torch.Tensor], *, deal: bool) -> tuple[torch.Tensor, ...]:
    """Sum products ``[B, S, X/d1]`` over the inner axis; with ``deal`` each rank gets its part of every sum's widths.

    Together with :func:`entered_of_outer` this is :func:`first_products` for products of any kind.
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
                return grid.inner.start_scatter(_by_rank(products, grid.inner.size))
            # A concatenation is not referenced elsewhere; a single product may be saved by recomputation.
            return grid.inner.start_sum(_side_by_side(products), in_place=len(products) > 1)

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
            started = [grid.inner.start_gather(_side_by_side(piece)) for piece in pieces]
            whole: Iterable[Sequence[torch.Tensor]] = (_of_ranks(wait(), widths) for wait in started)
        else:
            whole = pieces
        used, pending = [], []
        for piece in whole:
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
            pieces = (_of_ranks(wait(), [x_BSX.shape[-1]])[0] for wait in started)
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
                pending.append(grid.inner.start_scatter(_by_rank([grad_TX], grid.inner.size)))
            else:
                pending.append(grid.inner.start_sum(grad_TX, in_place=True))
        finish = partial(_joined, pending) if pending else None
        of_weights = partial(_weight_gradients, x_TX.detach(), [grad_BSH.flatten(0, -2)], ctx.needs_input_grad[3:])
        grad_TX, grad_weights = _finished(finish, of_weights, (ctx.weight,), grid)
        return None, None, None if grad_TX is None else grad_TX.view(ctx.shape), *grad_weights


class _EnteredOfOuter(torch.autograd.Function):
    """:func:`entered_of_outer`."""

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
            sums_TX = grid.inner.start_scatter(_by_rank(flat_TX, grid.inner.size))()
        else:
            sums_TX = grid.inner.start_sum(_side_by_side(flat_TX))()
        parts_TX = torch.split(sums_TX, widths, dim=-1)
        return tuple(part_TX.reshape(*products[0].shape[:-1], -1) for part_TX in parts_TX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if not ctx.deal:
            return None, None, *grads
        flat_TX = [grad.flatten(0, -2) for grad in grads]
        widths = [grad_TX.shape[-1] for grad_TX in flat_TX]
        parts_TX = _of_ranks(ctx.grid.inner.start_gather(_side_by_side(flat_TX))(), widths)
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
        dealt_TX = ctx.grid.inner.start_scatter(_by_rank([grad_BSX.flatten(0, -2)], ctx.grid.inner.size))()
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
    return _of_ranks(grid.inner.start_gather(x_TH)(), [x_TH.shape[1]])[0].view(*x_BSH.shape[:-1], -1)


def _summed_and_dealt(grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    dealt_TH = grid.inner.start_scatter(_by_rank([x_BSH.flatten(0, -2)], grid.inner.size))()
    # The near ranks reduce-scatter first, so that the sum over the far ranks has 1/d2 of the size.
    return grid.outer.start_sum(dealt_TH)().view(*x_BSH.shape[:-1], -1)


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


def _side_by_side(parts_TX: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts_TX), dim=-1) if len(parts_TX) > 1 else parts_TX[0]


def _by_rank(parts_TX: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
    """Return ``[R, T, X/R]``; entry r is the concatenation of rank r's widths of all parts."""
    return torch.cat([part_TX.view(len(part_TX), ranks, -1).movedim(1, 0) for part_TX in parts_TX], dim=-1)


def _of_ranks(x_RTX: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return one tensor ``[T, R · width]`` per part; this is the reverse of :func:`_by_rank`."""
    return tuple(part_RTX.movedim(0, 1).flatten(1) for part_RTX in torch.split(x_RTX, list(widths), dim=-1))
