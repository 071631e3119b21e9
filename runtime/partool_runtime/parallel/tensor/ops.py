"""Exchanges of tensor-parallel layers: the two conjugate operators of Megatron-LM (arXiv 1909.08053, section 3).

``copy_to_tp`` comes before matrices that are cut by outputs, ``reduce_from_tp`` after matrices that are cut by inputs.
If norms work on shares of the sequence (arXiv 2205.05198, section 4.2.2), the residual stream is ``[B, s, H]`` on each
rank. s is the number of tokens of a sequence divided by the number of ranks, rounded up; the padding on the last ranks
is never read and has zero gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from partool_runtime.parallel import second_pass
from partool_runtime.torch_internals.collectives import finished, start_gather, start_scatter_sum, start_sum


@dataclass(frozen=True, slots=True)
class Team:
    """The tensor ranks that share every matrix, and the settings of their exchanges."""

    group_name: str
    rank: int
    """Place of this rank in the group."""
    ranks: int
    length: int | None = None
    """Number of tokens of a sequence if each rank's residual stream holds a share of the tokens, else None."""
    overlap: bool = False
    """Whether gradients of inputs are reduced while gradients of weights are computed."""
    chunks: int = 1
    """Number of pieces of a product; the sum of one piece is in flight while the next piece is multiplied."""
    loss_tile: int = 0
    """Number of positions whose logits exist at once; 0 derives the number from the vocabulary's size."""
    symmetric: bool = False
    """Whether products and exchanges are fused, through symmetric memory of CUDA devices."""

    @property
    def share(self) -> int:
        """Number of tokens of a sequence per rank, if the residual stream holds a share."""
        return -(-(self.length or 0) // self.ranks)


def start_tokens(x_BsH: torch.Tensor, team: Team) -> torch.Tensor:
    """Start to all-gather the tokens from the ranks' shares; :func:`tokens` completes it."""
    return start_gather(x_BsH, team.ranks, team.group_name)


def tokens(gathered: torch.Tensor, team: Team) -> torch.Tensor:
    """Complete the all-gather of :func:`start_tokens` and return all tokens ``[B, S, H]``."""
    _, share, hidden = gathered.shape
    of_ranks = finished(gathered).view(team.ranks, -1, share, hidden)
    return of_ranks.transpose(0, 1).flatten(1, 2)[:, : team.length]


def start_reduce_from_tp(x_BSH: torch.Tensor, team: Team, *, fresh: bool = False) -> torch.Tensor:
    """Start to sum partial results over ranks; if ranks hold shares of the tokens, each rank gets the sum of its share.

    ``fresh`` allows the sum to overwrite ``x_BSH``. ``finished`` completes the sum.
    """
    if team.length is None:
        return start_sum(x_BSH, team.group_name, in_place=fresh)
    return start_scatter_sum(by_rank(x_BSH, team).transpose(0, 1).flatten(0, 1), team.ranks, team.group_name)


def by_rank(x_BSH: torch.Tensor, team: Team) -> torch.Tensor:
    """Return all tokens grouped by the rank that holds them, ``[B, ranks, s, H]``, padded with zeros at the end."""
    batch, length, hidden = x_BSH.shape
    missing = team.share * team.ranks - length
    padded = F.pad(x_BSH, (0, 0, 0, missing)) if missing else x_BSH
    return padded.reshape(batch, team.ranks, team.share, hidden)


def copy_to_tp(x: torch.Tensor, team: Team) -> torch.Tensor:
    """Return all tokens of a residual stream, for matrices cut by outputs; the gradient is summed over the ranks."""
    full_x: torch.Tensor = _CopyToTp.apply(x, team)  # type: ignore[no-untyped-call]
    return full_x


def reduce_from_tp(x_BSH: torch.Tensor, team: Team, *, fresh: bool = False) -> torch.Tensor:
    """Return the products' sum over ranks; if ranks hold shares of the tokens, only this rank's share of the sum.

    ``fresh`` means that no other code needs ``x_BSH``, so the sum overwrites it.
    """
    out: torch.Tensor = _ReduceFromTp.apply(x_BSH, team, fresh)  # type: ignore[no-untyped-call]
    return out


def gather_from_tp(x: torch.Tensor, widths: tuple[int, ...], team: Team) -> torch.Tensor:
    """Return ``x`` all-gathered along the last dimension, of which rank i holds ``widths[i]`` entries.

    All ranks must use the result in the same way. Then all ranks have the same gradient of the result, and each rank
    takes its part of the gradient without exchange.
    """
    out: torch.Tensor = _GatherFromTp.apply(x, widths, team)  # type: ignore[no-untyped-call]
    return out


class _CopyToTp(torch.autograd.Function):
    """Forward identity, backward all-reduce; if ranks hold shares of the tokens, all-gather and reduce-scatter."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.team = team  # type: ignore[attr-defined]
        return x.view_as(x) if team.length is None else tokens(start_tokens(x, team), team)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return finished(start_reduce_from_tp(grad, ctx.team)), None


class _ReduceFromTp(torch.autograd.Function):
    """Forward all-reduce, backward identity; if ranks hold shares of the tokens, reduce-scatter and all-gather."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, team: Team, fresh: bool) -> torch.Tensor:
        ctx.team = team  # type: ignore[attr-defined]
        if team.length is None and second_pass.is_unread():
            return x.view_as(x)
        return finished(start_reduce_from_tp(x, team, fresh=fresh))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad if ctx.team.length is None else tokens(start_tokens(grad, ctx.team), ctx.team), None, None


class _GatherFromTp(torch.autograd.Function):
    """All-gather of the ranks' columns; the backward pass takes this rank's columns of the gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, widths: tuple[int, ...], team: Team) -> torch.Tensor:
        first = sum(widths[: team.rank])
        ctx.mine = (first, first + widths[team.rank])  # type: ignore[attr-defined]
        padded = F.pad(x, (0, max(widths) - x.shape[-1]))
        of_ranks = finished(start_gather(padded.unsqueeze(0), team.ranks, team.group_name))
        return torch.cat([part[..., :width] for part, width in zip(of_ranks, widths, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, last = ctx.mine
        return grad[..., first:last], None, None
