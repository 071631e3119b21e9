"""Divergence from a teacher over a vocabulary of which each tensor rank holds some tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from partool_runtime.model.distillation import Teaching, distilled_loss, rows_at_once
from partool_runtime.parallel.tensor.ops import Team, copy_to_tp, start_tokens, tokens
from partool_runtime.torch_internals.collectives import finished, start_sum


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """:class:`~partool_runtime.model.distillation.Vocabulary` of the tensor ranks of a team."""

    team: Team
    first: int
    """Index of the first vocabulary token that this rank holds."""

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Vocabulary``."""
        return finished(start_sum(x, self.team.group_name, in_place=False, kind="max"))

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Vocabulary``."""
        return finished(start_sum(x, self.team.group_name, in_place=False))


def taught_vocabulary_loss(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_BS: torch.Tensor,
    teaching: Teaching,
    *,
    first: int,
    team: Team,
    chunk_logits: int,
    bias_V: torch.Tensor | None = None,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Return :func:`~partool_runtime.model.distillation.distilled_loss` of ranks that share the vocabulary.

    ``hidden`` and the teacher's hidden state are residual streams, all tokens or a share. Both models are cut alike:
    this rank holds the ``V`` tokens of both vocabularies that start at ``first``.
    """
    full_BSH, given = copy_to_tp(hidden, team), teaching.hidden
    full = given if team.length is None else tokens(start_tokens(given, team), team)
    of_all_tokens = replace(teaching, hidden=full)
    # Ranks exchange maxima and sums chunk by chunk, so that all need chunks of as many positions.
    rows = rows_at_once(team.loss_tile, chunk_logits, -(-teaching.vocabulary // team.ranks))
    shared = SharedVocabulary(team, first)
    result = distilled_loss(
        full_BSH, weight_VH, labels_BS, of_all_tokens, rows=rows, bias_V=bias_V, z_loss=z_loss, vocabulary=shared
    )
    teaching.kl = of_all_tokens.kl
    return result
