"""Products fused with the exchanges before or after them, through symmetric memory of CUDA devices.

In asynchronous tensor parallelism each rank multiplies the shares of the tokens in the order in which they arrive, and
sends one part of a result while it computes the next part (https://docs.pytorch.org/docs/stable/symmetric_memory.html).
Shares of the sequence can be exchanged in this way only if they have no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from partool.layout.tensor import Partition
from partool_runtime import deferral
from partool_runtime.errors import ConfigurationError
from partool_runtime.parallel.tensor.ops import Team, start_tokens, tokens
from partool_runtime.torch_internals.collectives import gathered_products, has_symmetric_products, scattered_product

_SEQUENCE = 1
"""Dimension of the tokens in ``[B, S, H]``."""


def check_symmetric(team: Team, device: torch.device, rows: Sequence[Partition] = ()) -> None:
    """Raise ConfigurationError PT647 where products and exchanges cannot be fused.

    ``rows`` is the plan's partition; a rank that holds no part of a matrix makes fusing impossible.
    """
    cut = [row for row in rows if row.style in ("column", "row")]
    idle = [row.name for row in cut if not all(all(row.spans(rank)) for rank in range(team.ranks))]
    # ROCm's devices have the type "cuda" too; the planner refuses them (PT458), whatever their torch defines.
    kind = "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type
    if kind != "cuda" or not has_symmetric_products():
        message = f"parallel.tensor.overlap: symmetric needs CUDA devices and a torch built for them, not {kind}"
    elif team.length is None:
        message = "parallel.tensor.overlap: symmetric exchanges shares of the sequence, and sequence_norms is off"
    elif team.length % team.ranks:
        message = f"parallel.tensor.overlap: symmetric cannot share {team.length} tokens evenly over {team.ranks} ranks"
    elif idle:
        message = f"parallel.tensor.overlap: symmetric, but some of {team.ranks} ranks hold nothing of {idle[0]}"
    else:
        return
    raise ConfigurationError("PT647", message, "Use parallel.tensor.overlap: backward.")


def symmetric_columns(
    x_BsH: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], team: Team
) -> tuple[torch.Tensor, ...]:
    """Return the products of all ranks' tokens with this rank's rows of several matrices, ``[B, S, width]`` each."""
    out: tuple[torch.Tensor, ...] = _Columns.apply(x_BsH, team, *weights, *biases)  # type: ignore[no-untyped-call]
    return out


def symmetric_row(x_BSI: torch.Tensor, weight_HI: torch.Tensor, team: Team) -> torch.Tensor:
    """Return the sum over ranks of ``x @ weight.T`` for this rank's share of the tokens, ``[B, s, H]``."""
    out: torch.Tensor = _Row.apply(x_BSI, weight_HI, team)  # type: ignore[no-untyped-call]
    return out


class _Columns(torch.autograd.Function):
    """Several linear maps of the tokens of all ranks; only the rank's share of the input is saved."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_BsH: torch.Tensor, team: Team, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        half = len(parameters) // 2
        weights = [weight for weight in parameters[:half] if weight is not None]
        ctx.save_for_backward(x_BsH, *weights)
        ctx.team = team  # type: ignore[attr-defined]
        _, products = gathered_products(x_BsH, [weight.T for weight in weights], _SEQUENCE, team.group_name)
        return tuple(
            product if bias is None else product + bias
            for product, bias in zip(products, parameters[half:], strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_BsH, *weights = ctx.saved_tensors
        team: Team = ctx.team
        needs_x, _, *needs = ctx.needs_input_grad
        needs_weight, needs_bias = needs[: len(weights)], needs[len(weights) :]
        gathering = start_tokens(x_BsH, team) if any(needs_weight) else None
        # The gradients are concatenated for one product; its parts are sent to each rank when they are done.
        grad_x = _scattered(torch.cat(grads, -1), torch.cat(weights), team) if needs_x else None
        full_x = x_BsH if gathering is None else tokens(gathering, team)
        pairs = list(zip(grads, needs_weight, needs_bias, strict=True))
        of_weights = [deferral.of_weight(full_x, grad) if wanted else None for grad, wanted, _ in pairs]
        of_biases = [deferral.of_bias(grad) if wanted else None for grad, _, wanted in pairs]
        return grad_x, None, *of_weights, *of_biases


class _Row(torch.autograd.Function):
    """A linear map cut by inputs, whose sum over the ranks is scattered to shares of the tokens."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BSI: torch.Tensor, weight_HI: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.save_for_backward(x_BSI, weight_HI)
        ctx.team = team  # type: ignore[attr-defined]
        return _scattered(x_BSI, weight_HI.T, team)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BsH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_BSI, weight_HI = ctx.saved_tensors
        full_BSH, products = gathered_products(grad_BsH, [weight_HI], _SEQUENCE, ctx.team.group_name)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        return products[0] if needs_x else None, deferral.of_weight(x_BSI, full_BSH) if needs_weight else None, None


def _scattered(x_BSI: torch.Tensor, weight_IO: torch.Tensor, team: Team) -> torch.Tensor:
    return scattered_product(x_BSI.contiguous(), weight_IO, _SEQUENCE, team.group_name)
