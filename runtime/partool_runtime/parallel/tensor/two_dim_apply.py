"""Two-dimensional tensor parallelism applied to a decoder: layers, embedding and head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from partool.layout.tensor import chunks
from partool.plan.types import Plan
from partool_runtime.mesh import Ranks
from partool_runtime.model import Decoder, DecoderParts
from partool_runtime.model.parts import TiedEmbedding
from partool_runtime.parallel.tensor.ops import Team
from partool_runtime.parallel.tensor.two_dim import grid_of, put_products
from partool_runtime.parallel.tensor.two_dim_ops import Grid, dealt_rows, gathered_hidden, outer_sum
from partool_runtime.parallel.tensor.vocabulary import looked_up, vocabulary_loss

Rows = Callable[[torch.Tensor], torch.Tensor]


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
        whole_BSH = gathered_hidden(self.grid, hidden_BSH)
        return vocabulary_loss(
            whole_BSH, weight_VH, labels_BS, first=self.first, team=self.team, sum_input=False, **how
        )


def put_two_dim(model: Decoder | DecoderParts, plan: Plan, ranks: Ranks) -> None:
    """Make a decoder, or the stages of a pipeline rank, work in two dimensions, in place.

    The model's parameters must already be this rank's parts.
    """
    grid, size, place = grid_of(plan.layout, ranks), ranks.tp.size, ranks.tp.place
    put_products(model, grid)
    # Rows of the head and of a tied embedding are cut over all ranks, rows of an untied embedding over the outer axis.
    first = chunks(plan.model.vocab, size)[place][0]
    team = Team(ranks.tensor_group.group_name, place, size, loss_tile=plan.layout.tiles.loss)
    _put_loss(model, _Loss(grid, team, first))
    embedding = model.embed
    if isinstance(embedding, TiedEmbedding):
        # A tied embedding's forward pass does both the lookup and the head.
        _put(embedding, "rows", partial(_tied_rows, embedding, grid, first))
    elif embedding is not None and plan.model.tied_embeddings:
        _put(embedding, "forward", partial(_tied_rows, embedding, grid, first))
    elif embedding is not None:
        own = chunks(plan.model.vocab, grid.outer.size)[grid.outer.place]
        _put(embedding, "forward", partial(_rows, embedding, grid, own[0]))


def _put_loss(model: Decoder | DecoderParts, loss: _Loss) -> None:
    if model.loss_module is not None:
        _put(model.loss_module, "loss", loss)


def _put(module: nn.Module, name: str, function: Callable[..., torch.Tensor]) -> None:
    setattr(module, name, function)


def _rows(module: nn.Embedding, grid: Grid, first: int, tokens_BS: torch.Tensor) -> torch.Tensor:
    return outer_sum(grid, looked_up(tokens_BS, module.weight, first, module.padding_idx))


def _tied_rows(module: nn.Embedding, grid: Grid, first: int, tokens_BS: torch.Tensor) -> torch.Tensor:
    return dealt_rows(grid, looked_up(tokens_BS, module.weight, first, module.padding_idx))
