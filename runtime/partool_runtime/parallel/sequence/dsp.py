"""Dynamic sequence parallelism (DSP, arXiv 2403.10266): layers differ in the axis along which the token grid is cut.

Layers that attend along columns hold whole columns, and layers that attend along rows hold whole rows, so attention
itself exchanges nothing. Where the axis changes, the residual stream is exchanged by one all-to-all. Two layers of
different axes need two all-to-alls; Ulysses would need two per layer. Before the first layer and after the last
layer of a stage a rank's tokens are whole columns. Sizes need not be divisible by the number of ranks, and no padding
is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from partool.layout.grid import Axis, Turn, tokens_by_rank, turns, whole_rows
from partool.layout.sequence import Spans, index, tokens
from partool.plan.layout import Layout
from partool.strategies.sequence import ON_GRIDS
from partool_runtime.model.attention import Context
from partool_runtime.model.decoder import Block
from partool_runtime.parallel.comm import SEQUENCE
from partool_runtime.parallel.sequence.op import finished
from partool_runtime.parallel.sequence.types import SequenceTeam
from partool_runtime.torch_internals.collectives import start_exchange
from partool_runtime.torch_internals.tensors import without_modes


class Turning(NamedTuple):
    """Exchange after which ranks hold whole rows of the grid instead of whole columns, or columns instead of rows."""

    group_name: str
    leaving_S: torch.Tensor  # noqa: N815
    """Indices of the tokens to send, among the rank's tokens, ordered by receiver."""
    sent: list[int]
    """Number of tokens sent to each rank."""
    tokens_before: int
    """Number of tokens, with padding, that the rank holds before the exchange."""
    arriving_S: torch.Tensor  # noqa: N815
    """Indices of the arriving tokens, among the rank's tokens after the exchange, ordered by sender."""
    received: list[int]
    tokens_after: int

    @property
    def back(self) -> Turning:
        """The reverse exchange."""
        return Turning(
            self.group_name,
            self.arriving_S,
            self.received,
            self.tokens_after,
            self.leaving_S,
            self.sent,
            self.tokens_before,
        )


class Turner:
    """Exchanges between ranks that share sequences; tensor ranks take part if norms work on shares of the sequence."""

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: int, tensor: int = 1) -> None:
        """``group`` has ``ranks`` × ``tensor`` ranks, with tensor ranks adjacent; ``rank`` is this rank's place."""
        self._group_name, self._rank, self._ranks, self._tensor = group.group_name, rank, ranks, tensor
        self._ways: dict[tuple[tuple[int, int], torch.device], Turning] = {}

    @classmethod
    def open(cls, team: SequenceTeam, layout: Layout) -> Turner:
        """Return the object that makes the exchanges of a plan's team; a collective of all ranks of the world."""
        if not turns_with_tensor_ranks(layout):
            return cls(team.group, team.rank, team.ranks)
        tensor = layout.mesh.tp
        # Neighbouring teams in the list are of different tensor ranks.
        together = [team.everyone[first : first + tensor] for first in range(0, len(team.everyone), tensor)]
        group = team.groups.of([sorted(chain.from_iterable(teams)) for teams in together], SEQUENCE)
        assert group is not None, "every rank is in a team"
        return cls(group, group.rank(), team.ranks, tensor)

    def __call__(self, x_BSH: torch.Tensor, to: Axis, grid: tuple[int, int]) -> torch.Tensor:
        """Make each rank hold whole rows or whole columns of the grid, as ``to`` says; return this rank's hidden state.

        H can have any size. The backward pass makes the reverse exchange.
        """
        key = (grid, x_BSH.device)
        if key not in self._ways:
            # Made outside of inference mode, since later passes with gradients cannot use inference tensors.
            with torch.inference_mode(False):
                self._ways[key] = self._way(grid, x_BSH.device)
        way = self._ways[key] if to == "row" else self._ways[key].back
        out: torch.Tensor = _Turned.apply(x_BSH, way)  # type: ignore[no-untyped-call]
        return out

    def _way(self, grid: tuple[int, int], device: torch.device) -> Turning:
        """Return the exchange from whole columns to whole rows."""
        columns, rows = (tokens_by_rank(grid, self._ranks, axis, self._tensor) for axis in ("column", "row"))
        with without_modes():  # the host reads the numbers of tokens
            leaving_S, sent = _matched(columns[self._rank], rows)
            arriving_S, received = _matched(rows[self._rank], columns)
            places = leaving_S.tolist(), arriving_S.tolist()
        leaving_S, arriving_S = (torch.tensor(each, dtype=torch.int64, device=device) for each in places)
        sizes = [self._share(cut) for cut in (columns, rows)]
        return Turning(self._group_name, leaving_S, sent, sizes[0], arriving_S, received, sizes[1])

    def _share(self, cut: Sequence[Spans]) -> int:
        """Return this rank's number of tokens with padding: the number of the first tensor rank, which has the most."""
        return tokens(cut[self._rank - self._rank % self._tensor])


def turns_with_tensor_ranks(layout: Layout) -> bool:
    """Return whether tensor ranks take part in a team's exchanges, since norms work on their shares of the sequence."""
    return layout.sequence.method in ON_GRIDS and layout.tensor.sequence_norms and layout.mesh.tp > 1


def _matched(mine: Spans, theirs: Sequence[Spans]) -> tuple[torch.Tensor, list[int]]:
    """Return indices into the tokens ``mine``, grouped by the rank that has them in ``theirs``, and each group's size.

    Every rank holds its tokens in the order of the sequence, so tokens are also sent in the order of the sequence.
    """
    owner_L = torch.empty(sum(map(tokens, theirs)), dtype=torch.int64)
    for rank, spans in enumerate(theirs):
        owner_L[index(spans)] = rank
    owner_S = owner_L[index(mine)]
    return owner_S.argsort(stable=True), owner_S.bincount(minlength=len(theirs)).tolist()


class _Turned(torch.autograd.Function):
    """Exchange of the hidden state; the backward pass makes the reverse exchange."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BSH: torch.Tensor, way: Turning) -> torch.Tensor:
        ctx.way = way  # type: ignore[attr-defined]
        return _traded(x_BSH, way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _traded(grad_BSH, ctx.way.back), None


def _traded(x_BSH: torch.Tensor, way: Turning) -> torch.Tensor:
    """Send tokens to the ranks that hold them after the exchange; padding of a share is zero."""
    # Tokens are dimension 0, so that the tokens for one rank are contiguous.
    leaving_SBH = x_BSH.transpose(0, 1).index_select(0, way.leaving_S)
    arrived_SBH = finished(start_exchange(leaving_SBH, way.sent, way.received, way.group_name))
    batch, _, hidden = x_BSH.shape
    fresh = x_BSH.new_empty if way.tokens_after == len(way.arriving_S) else x_BSH.new_zeros
    return fresh(batch, way.tokens_after, hidden).index_copy_(1, way.arriving_S, arrived_SBH.transpose(0, 1))


def row_positions(team: SequenceTeam, grid: tuple[int, int]) -> tuple[int, ...]:
    """Return the positions of the tokens in this rank's whole rows of the grid, see ``Contexts.row_positions``."""
    return tuple(index(whole_rows(*grid, team.ranks)[team.rank]))


def put(blocks: Sequence[Block], team: SequenceTeam, layout: Layout) -> None:
    """Exchange the residual stream between layers of different axes, in place.

    The exchange is outside of compiled and recomputed code, since recomputation would repeat the exchange.
    ``Contexts.row_positions`` of the model holds the rank's tokens in layers along rows.
    """
    turner = Turner.open(team, layout)
    for layers in chains(blocks, layout.pipeline.bounds):
        axes = [axis for block in layers if (axis := block.attention.layout.axis) is not None]
        assert len(axes) == len(layers), "a layer that attends along no axis of a grid"
        for block, turn in zip(layers, turns(axes), strict=True):
            _hook(block, turn, turner)


def chains(blocks: Sequence[Block], stages: Sequence[tuple[int, int]]) -> list[list[Block]]:
    """Return the layers of each stage, in model order."""
    of_stages = [[block for block in blocks if first <= block.number < stop] for first, stop in stages]
    return [chain for chain in of_stages if chain]


def _hook(block: Block, turn: Turn, turner: Turner) -> None:
    axis = block.attention.layout.axis
    if turn.before is not None or axis == "row":
        block.register_forward_pre_hook(partial(_enter, turn.before, axis, turner))
    if turn.after is not None:
        block.register_forward_hook(partial(_leave, turn.after, turner))


def _enter(
    before: Axis | None, axis: Axis | None, turner: Turner, block: torch.nn.Module, inputs: tuple[Any, ...]
) -> tuple[torch.Tensor, Context]:
    """Exchange a layer's input where the axis changes, and pass the layer the context of its tokens."""
    x_BSH, context = inputs
    if before is not None:
        x_BSH = turner(x_BSH, before, context.tokens.grid)
    return x_BSH, context.along_rows if axis == "row" else context


def _leave(
    after: Axis, turner: Turner, block: torch.nn.Module, inputs: tuple[Any, ...], out_BSH: torch.Tensor
) -> torch.Tensor:
    return turner(out_BSH, after, inputs[1].tokens.grid)
