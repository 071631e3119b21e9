"""Biases of stacked experts: each row of an input, sorted by expert, gets the bias of its expert."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable


def add_expert_bias(
    rows_RO: torch.Tensor, bias: torch.Tensor, ends_E: torch.Tensor, first_column: int = 0
) -> torch.Tensor:
    """Return rows ``[R, O]`` with the bias of each row's expert added; ``ends_E`` is the index after its rows.

    ``bias`` holds ``[E · W]`` numbers, expert after expert, for the columns from ``first_column`` on: tensor ranks
    whose results are summed have different columns, so that each number is added once. Rows behind the last expert's
    have no meaning. The gradient of the bias is a product with an indicator of each row's expert: it is deterministic.
    """
    out: torch.Tensor = _AddBias.apply(rows_RO, bias, ends_E, first_column)  # type: ignore[no-untyped-call]
    return out


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, rows_RO: torch.Tensor, bias: torch.Tensor, ends_E: torch.Tensor, first: int
    ) -> torch.Tensor:
        ctx.save_for_backward(ends_E)
        ctx.where = slice(first, first + bias.numel() // len(ends_E)), bias.dtype  # type: ignore[attr-defined]
        number = torch.arange(len(rows_RO), device=rows_RO.device)
        experts_R = torch.searchsorted(ends_E, number, right=True).clamp_(max=len(ends_E) - 1)
        bias_EW = bias.view(len(ends_E), -1)
        added_RW = bias_EW.index_select(0, experts_R)
        width = added_RW.shape[1]
        if width == rows_RO.shape[1]:
            return added_RW.add_(rows_RO)
        out_RO = rows_RO.clone()
        out_RO[:, first : first + width] += added_RW
        return out_RO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ends_E,), (columns, dtype) = ctx.saved_tensors, ctx.where
        if not ctx.needs_input_grad[1]:
            return grad_RO, None, None, None
        number_R1 = torch.arange(len(grad_RO), device=grad_RO.device)[:, None]
        starts_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
        mine_RE = ((number_R1 >= starts_E) & (number_R1 < ends_E)).to(grad_RO.dtype)
        return grad_RO, (mine_RE.T @ grad_RO[:, columns]).flatten().to(dtype), None, None
