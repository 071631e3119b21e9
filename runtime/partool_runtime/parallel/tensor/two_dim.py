"""Projections and norms of two-dimensional tensor parallelism (ATP, arXiv 2301.08658).

The hidden state is ``[B, S, H/d2]`` everywhere between embedding and head. Attention heads are distributed over all
ranks.
Parameters must already be the rank's parts (:mod:`partool.layout.tensor.own`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool.plan.layout import Layout
from partool_runtime.mesh import Ranks
from partool_runtime.model.norm import LayerNorm, RMSNorm, wide_dtype
from partool_runtime.model.projection import Projection
from partool_runtime.parallel.tensor.two_dim_comm import Axis, Grid
from partool_runtime.parallel.tensor.two_dim_ops import first_products, second_product
from partool_runtime.parallel.tensor.two_dim_sums import (
    copy_to_outer,
    gathered_of_inner,
    inner_sum,
    outer_sum,
    summed_over_inner,
)


def grid_of(layout: Layout, ranks: Ranks) -> Grid:
    """Return the grid of this rank; a collective of all ranks of the world."""
    outer, inner = (
        Axis(group.group_name if (group := ranks.groups.of(axis.parts)) else "", axis.size, axis.place)
        for axis in (ranks.tp0, ranks.tp1)
    )
    return Grid(outer, inner, layout.tensor.chunks, overlap=layout.tensor.overlap == "backward")


class FirstProducts:
    """``InputProducts`` of matrices whose outputs are cut over the outer axis."""

    joint = True

    def __init__(self, grid: Grid, *, deal: bool) -> None:
        """With ``deal`` inner ranks divide the outputs, as they do with heads; without it each of them has all."""
        self.grid, self.deal = grid, deal

    def __call__(self, x: torch.Tensor, projections: Sequence[Projection]) -> tuple[torch.Tensor, ...]:
        """Return the products of the hidden state ``[B, S, H/d2]``, summed over the inner axis."""
        weights = [matrix for each in projections if (matrix := each.matrix) is not None]
        if len(weights) == len(projections):
            sums = first_products(self.grid, x, weights, deal=self.deal)
        else:
            copied = copy_to_outer(self.grid, x)
            products = [each.product(copied, biased=False) for each in projections]
            sums = summed_over_inner(self.grid, products, deal=self.deal)
        return tuple(_biased(one, each.bias) for one, each in zip(sums, projections, strict=True))


class SecondProduct:
    """``OutputProduct`` of a matrix whose outputs are cut over the inner axis."""

    def __init__(self, grid: Grid, *, dealt: bool) -> None:
        """With ``dealt`` inner ranks have divided the inputs, as they do with heads; without it each has all."""
        self.grid, self.dealt = grid, dealt

    def __call__(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Return the product ``[B, S, H/d2]``, summed over the outer axis."""
        if (matrix_HX := projection.matrix) is not None:
            return _biased(second_product(self.grid, x, matrix_HX, dealt=self.dealt), projection.bias)
        product = projection.product(gathered_of_inner(self.grid, x, dealt=self.dealt), biased=False)
        return _biased(outer_sum(self.grid, product), projection.bias)


def _biased(total: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add a bias to a product that is already summed over ranks."""
    return total if bias is None else total + bias


class GridNorm:
    """:class:`~partool_runtime.model.norm.NormFunction` whose statistics are over the widths of all inner ranks."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __call__(self, norm: RMSNorm | LayerNorm, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[B, S, H/d2]``."""
        return _rms_norm(norm, self.grid, x) if isinstance(norm, RMSNorm) else _layer_norm(norm, self.grid, x)


def _rms_norm(module: RMSNorm, grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    wide = x_BSH.to(wide_dtype(x_BSH.dtype))
    scale = torch.rsqrt(_mean(grid, wide.square()) + module.eps)
    return (wide * scale).to(x_BSH.dtype) * module.weight


def _layer_norm(module: LayerNorm, grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    wide = x_BSH.to(wide_dtype(x_BSH.dtype))
    # The variance uses centred values: E[x²] - E[x]² as a difference of two large numbers would lose digits.
    centred = wide - _mean(grid, wide)
    scale = torch.rsqrt(_mean(grid, centred.square()) + module.eps)
    return (centred * scale * module.weight + module.bias).to(x_BSH.dtype)


def _mean(grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    """Return the mean over all inner ranks' widths, ``[B, S, 1]``."""
    return inner_sum(grid, x_BSH.sum(-1, keepdim=True)) / (x_BSH.shape[-1] * grid.inner.size)
