"""What tensor-parallel layers exchange: the two conjugate operators of Megatron-LM (arXiv 1909.08053, section 3).

``entered`` stands before matrices that are cut by outputs, ``left`` behind those that are cut by inputs. With the
sequence shared for norms (arXiv 2205.05198, section 4.2.2) the residual stream is ``[B, s, H]`` on each rank, s the
tokens of a sequence over the ranks, rounded up; what the last ranks have too much is never looked at and has gradients
of zero.
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
    """The ranks that share every matrix, and how they work together."""

    group_name: str
    rank: int
    """Place of this rank among them."""
    ranks: int
    length: int | None = None
    """Tokens of a sequence, where the residual stream holds a share of them; None: it holds all."""
    overlap: bool = False
    """Sums of gradients of inputs travel while those of weights are computed."""
    chunks: int = 1
    """Pieces of a product whose sums travel while the next is multiplied."""
    loss_tile: int = 0
    """Positions whose logits exist at once; 0: by the size of the vocabulary."""
    symmetric: bool = False
    """Products and exchanges are fused, through symmetric memory of CUDA devices."""

    @property
    def share(self) -> int:
        """Tokens of a sequence per rank, where the residual stream holds a share."""
        return -(-(self.length or 0) // self.ranks)


def start_tokens(x_BsH: torch.Tensor, team: Team) -> torch.Tensor:
    """Begin to gather all tokens from the ranks' shares; :func:`tokens` ends it."""
    return start_gather(x_BsH, team.ranks, team.group_name)


def tokens(gathered: torch.Tensor, team: Team) -> torch.Tensor:
    """Return all tokens ``[B, S, H]`` of what :func:`start_tokens` has begun to gather."""
    _, share, hidden = gathered.shape
    of_ranks = finished(gathered).view(team.ranks, -1, share, hidden)
    return of_ranks.transpose(0, 1).flatten(1, 2)[:, : team.length]


def start_leaving(x_BSH: torch.Tensor, team: Team, *, fresh: bool = False) -> torch.Tensor:
    """Begin to sum over ranks what each has a part of; each gets its share of the tokens where it holds shares.

    ``fresh`` allows to sum in place. ``finished`` ends it.
    """
    if team.length is None:
        return start_sum(x_BSH, team.group_name, in_place=fresh)
    return start_scatter_sum(by_rank(x_BSH, team).transpose(0, 1).flatten(0, 1), team.ranks, team.group_name)


def by_rank(x_BSH: torch.Tensor, team: Team) -> torch.Tensor:
    """Return all tokens by the rank whose share they are in, ``[B, ranks, s, H]``, the last ones' filled with zeros."""
    batch, length, hidden = x_BSH.shape
    missing = team.share * team.ranks - length
    padded = F.pad(x_BSH, (0, 0, 0, missing)) if missing else x_BSH
    return padded.reshape(batch, team.ranks, team.share, hidden)


def entered(x: torch.Tensor, team: Team) -> torch.Tensor:
    """Return all tokens of a residual stream, for matrices cut by outputs; sums the gradient over the ranks."""
    whole: torch.Tensor = _Entered.apply(x, team)  # type: ignore[no-untyped-call]
    return whole


def left(x_BSH: torch.Tensor, team: Team, *, fresh: bool = False) -> torch.Tensor:
    """Return the sum over ranks of products cut by inputs, of this rank's share of the tokens where it holds shares.

    ``fresh`` says that nobody else needs ``x_BSH``, which then becomes the sum.
    """
    out: torch.Tensor = _Left.apply(x_BSH, team, fresh)  # type: ignore[no-untyped-call]
    return out


def gathered(x: torch.Tensor, widths: tuple[int, ...], team: Team) -> torch.Tensor:
    """Return the last dimensions of all ranks one after the other, ``widths`` of them; all ranks go on alike.

    Hence the gradient of a rank's part is its part of the gradient, without any exchange.
    """
    out: torch.Tensor = _Gathered.apply(x, widths, team)  # type: ignore[no-untyped-call]
    return out


class _Entered(torch.autograd.Function):
    """Identity, or all tokens of shares; backward the sum over ranks, or its share."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.team = team  # type: ignore[attr-defined]
        return x.view_as(x) if team.length is None else tokens(start_tokens(x, team), team)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return finished(start_leaving(grad, ctx.team)), None


class _Left(torch.autograd.Function):
    """The sum over ranks, or its share; backward the identity, or all tokens of shares."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, team: Team, fresh: bool) -> torch.Tensor:
        ctx.team = team  # type: ignore[attr-defined]
        if team.length is None and second_pass.is_unread():
            return x.view_as(x)
        return finished(start_leaving(x, team, fresh=fresh))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad if ctx.team.length is None else tokens(start_tokens(grad, ctx.team), ctx.team), None, None


class _Gathered(torch.autograd.Function):
    """All ranks' columns; backward a rank's own."""

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
