"""Dynamic sequence parallelism (DSP, arXiv 2403.10266): the axis of a grid that is cut changes between layers.

Layers that attend along columns work on whole columns, layers that attend along rows on whole rows, so attention itself
exchanges nothing. Where the axis changes, the residual stream is traded once: two exchanges per pair of layers, where
Ulysses inside of every layer needs four. Before the first and behind the last layer of a stage a rank holds whole
columns, as its share of the tokens does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from partool.layout.grid import Axis, Turn, turns, whole_rows
from partool.layout.sequence import bounds, even, index
from partool.plan.types import Layout
from partool_runtime.model.attention import Context
from partool_runtime.model.decoder import Block
from partool_runtime.parallel.sequence.types import SequenceTeam
from partool_runtime.parallel.sequence.waits import finished
from partool_runtime.torch_internals import start_exchange


class Cut(NamedTuple):
    """How a grid is cut over the ranks of a team."""

    group_name: str
    rank: int
    rows: tuple[int, ...]
    """Whole rows of each rank, where it holds such."""
    columns: tuple[int, ...]
    """Whole columns of each rank, where it holds such."""


def make_cut(team: SequenceTeam, grid: tuple[int, int]) -> Cut:
    """Return how a grid of ``(rows, columns)`` is cut over the ranks of a team."""
    rows, columns = (tuple(even(size, team.ranks)) for size in grid)
    return Cut(team.group.group_name, team.rank, rows, columns)


def turned(team: SequenceTeam, grid: tuple[int, int]) -> tuple[int, ...]:
    """Return the places in the sequence of this rank's tokens where it holds whole rows (``Contexts.turned``)."""
    return tuple(index(whole_rows(*grid, team.ranks)[team.rank]))


def put(blocks: Sequence[Block], team: SequenceTeam, layout: Layout) -> None:
    """Let the residual stream turn between layers of different axes, in place.

    It turns outside of what is compiled and computed again, which would trade it a second time. ``Contexts.turned`` of
    the model says which tokens the rank then holds.
    """
    for chain in chains(blocks, layout.stages):
        axes = [axis for block in chain if (axis := block.attention.layout.axis) is not None]
        assert len(axes) == len(chain), "a layer that attends along no axis of a grid"
        for block, turn in zip(chain, turns(axes), strict=True):
            _hook(block, turn, team)


def chains(blocks: Sequence[Block], stages: Sequence[tuple[int, int]]) -> list[list[Block]]:
    """Return the layers of each stage, in the order of the model."""
    of_stages = [[block for block in blocks if first <= block.number < stop] for first, stop in stages]
    return [chain for chain in of_stages if chain]


def _hook(block: Block, turn: Turn, team: SequenceTeam) -> None:
    axis = block.attention.layout.axis
    if turn.before is not None or axis == "row":
        block.register_forward_pre_hook(partial(_enter, turn.before, axis, team))
    if turn.after is not None:
        block.register_forward_hook(partial(_leave, turn.after, team))


def _enter(
    before: Axis | None, axis: Axis | None, team: SequenceTeam, block: torch.nn.Module, inputs: tuple[Any, ...]
) -> tuple[torch.Tensor, Context]:
    """Turn what goes into a layer, and tell it which tokens these are."""
    x_BSH, context = inputs
    if before is not None:
        x_BSH = exchanged(x_BSH, before, make_cut(team, context.tokens.grid))
    return x_BSH, context.turned if axis == "row" else context


def _leave(
    after: Axis, team: SequenceTeam, block: torch.nn.Module, inputs: tuple[Any, ...], out_BSH: torch.Tensor
) -> torch.Tensor:
    return exchanged(out_BSH, after, make_cut(team, inputs[1].tokens.grid))


def exchanged(x_BSH: torch.Tensor, to: Axis, cut: Cut) -> torch.Tensor:
    """Return the hidden state of this rank's whole rows, or columns, of that of its whole columns, or rows.

    H may be any width. The gradient comes back the same way.
    """
    out: torch.Tensor = _Exchanged.apply(x_BSH, to, cut)  # type: ignore[no-untyped-call]
    return out


class _Exchanged(torch.autograd.Function):
    """Trades the hidden state between the two cuts of a grid; backward the other way round."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BSH: torch.Tensor, to: Axis, cut: Cut) -> torch.Tensor:
        ctx.back, ctx.cut = ("row" if to == "column" else "column"), cut  # type: ignore[attr-defined]
        return _traded(x_BSH, to, cut)

    @staticmethod
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _traded(grad_BSH, ctx.back, ctx.cut), None, None


def _traded(x_BSH: torch.Tensor, to: Axis, cut: Cut) -> torch.Tensor:
    """Exchange blocks of ``[rows, B, columns, H]`` of one rank's rows and another's columns."""
    batch, _, hidden = x_BSH.shape
    mine, rows, columns = cut.rank, cut.rows, cut.columns
    of_rows = [batch * columns[mine] * count for count in rows]
    of_columns = [batch * rows[mine] * count for count in columns]
    if to == "row":
        # Rows of one rank lie together once they are the first dimension.
        x_RBcH = x_BSH.reshape(batch, sum(rows), columns[mine], hidden).transpose(0, 1)
        blocks = _sent(x_RBcH.reshape(-1, hidden), of_rows, of_columns, cut)
        parts = [
            block.view(rows[mine], batch, count, hidden)
            for block, count in zip(torch.split(blocks, of_columns), columns, strict=True)
        ]
        return torch.cat(parts, dim=2).transpose(0, 1).reshape(batch, -1, hidden)
    x_rBCH = x_BSH.reshape(batch, rows[mine], sum(columns), hidden).transpose(0, 1)
    parts = [x_rBCH[:, :, first:stop].reshape(-1, hidden) for first, stop in bounds(columns)]
    x_RBcH = _sent(torch.cat(parts), of_columns, of_rows, cut).view(sum(rows), batch, columns[mine], hidden)
    return x_RBcH.transpose(0, 1).reshape(batch, -1, hidden)


def _sent(x_XH: torch.Tensor, sent: list[int], received: list[int], cut: Cut) -> torch.Tensor:
    return finished(start_exchange(x_XH.contiguous(), sent, received, cut.group_name))
