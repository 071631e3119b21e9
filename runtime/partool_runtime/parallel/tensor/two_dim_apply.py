"""Two-dimensional tensor parallelism applied to a decoder: layers, embedding and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partool.layout.tensor import chunks
from partool.plan.types import Plan
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.tensor.ops import Team
from partool_runtime.parallel.tensor.sharding import LayerSharding, Sharding
from partool_runtime.parallel.tensor.two_dim import FirstProducts, GridNorm, SecondProduct, grid_of
from partool_runtime.parallel.tensor.two_dim_comm import Grid
from partool_runtime.parallel.tensor.two_dim_sums import dealt_rows, gathered_hidden, outer_sum
from partool_runtime.parallel.tensor.vocabulary import looked_up, vocabulary_loss


@dataclass(frozen=True, slots=True)
class _Loss:
    """The head's loss: every rank gathers the hidden state and takes its part of the vocabulary."""

    grid: Grid
    team: Team
    """All tensor ranks."""
    first: int
    """Index of the first vocabulary token that this rank holds."""

    def __call__(
        self, hidden_BSH: torch.Tensor, weight_VH: torch.Tensor, labels_BS: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """Return the sum of token losses, see :data:`partool_runtime.model.decoder.HeadLoss`."""
        full_BSH = gathered_hidden(self.grid, hidden_BSH)
        return vocabulary_loss(full_BSH, weight_VH, labels_BS, first=self.first, team=self.team, sum_input=False, **how)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The lookup in a table whose rows are cut over the outer axis."""

    grid: Grid
    first: int
    """Index of the first vocabulary token that this rank holds."""

    def __call__(self, embed: nn.Embedding, index: torch.Tensor) -> torch.Tensor:
        """Return the rows, ``[B, S, H/d2]``."""
        return outer_sum(self.grid, looked_up(index, embed.weight, self.first, embed.padding_idx))


@dataclass(frozen=True, slots=True)
class _TiedRows:
    """The lookup in a table that is also the head, whose rows are cut over all ranks."""

    grid: Grid
    first: int
    """Index of the first vocabulary token that this rank holds."""

    def __call__(self, embed: nn.Embedding, index: torch.Tensor) -> torch.Tensor:
        """Return the rows, ``[B, S, H/d2]``."""
        return dealt_rows(self.grid, looked_up(index, embed.weight, self.first, embed.padding_idx))


def two_dim_sharding(plan: Plan, ranks: Ranks) -> Sharding:
    """Return how a decoder, or the stages of a pipeline rank, work in two dimensions."""
    grid, size, place = grid_of(plan.layout, ranks), ranks.tp.size, ranks.tp.place
    norm = GridNorm(grid)
    layer = LayerSharding(
        FirstProducts(grid, deal=True),
        SecondProduct(grid, dealt=True),
        FirstProducts(grid, deal=False),
        SecondProduct(grid, dealt=False),
        norm=norm,
    )
    # Rows of the head and of a tied embedding are cut over all ranks, rows of an untied embedding over the outer axis.
    first = chunks(plan.model.vocab, size)[place][0]
    team = Team(ranks.tensor_group.group_name, place, size, loss_tile=plan.layout.tiles.loss)
    of_outer = chunks(plan.model.vocab, grid.outer.size)[grid.outer.place][0]
    rows = _TiedRows(grid, first) if plan.model.tied_embeddings else _Rows(grid, of_outer)
    return Sharding(lambda _: layer, rows, None, _Loss(grid, team, first), norm)
