"""Log-probabilities of single labels over a vocabulary of which each tensor rank holds some tokens."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from partool_runtime.model.norm import wide_dtype
from partool_runtime.parallel.tensor.ops import Team, start_tokens, tokens
from partool_runtime.torch_internals.collectives import finished, start_sum

_IGNORED = -100


@torch.no_grad()
def vocabulary_scores(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_BS: torch.Tensor,
    bias_V: torch.Tensor | None,
    *,
    first: int,
    team: Team,
    chunk: int,
) -> torch.Tensor:
    """Return what :func:`partool_runtime.model.scores.scores` says of all positions, ``[2, B, S]``, on every rank.

    ``hidden`` is the residual stream, all tokens or a share. This rank holds the ``V`` tokens of the vocabulary that
    start at ``first``; the logits of ``chunk`` positions exist at once.
    """
    full_BSH = hidden if team.length is None else tokens(start_tokens(hidden, team), team)
    hidden_TH, labels_T = full_BSH.flatten(0, 1), labels_BS.flatten()
    wide = wide_dtype(hidden_TH.dtype)
    parts = []
    for start in range(0, len(labels_T), chunk):
        piece = slice(start, start + chunk)
        logits_CV = F.linear(hidden_TH[piece], weight_VH, bias_V).to(wide)
        parts.append(_seen(logits_CV, labels_T[piece] - first, first))
    highest_T, choice_T, sums_T, target_T = torch.cat(parts, 1)
    top_T = finished(start_sum(highest_T, team.group_name, in_place=False, kind="max"))
    packed_2T = torch.stack([sums_T * (highest_T - top_T).exp(), target_T])
    total_T, target_T = finished(start_sum(packed_2T, team.group_name, in_place=True))
    # Of equal logits the one with the lowest number is the first choice, so its negative number is the largest.
    choice_T = (-choice_T).where(highest_T == top_T, -torch.inf)
    choice_T = -finished(start_sum(choice_T, team.group_name, in_place=False, kind="max"))
    losses_T = (total_T.log() + top_T - target_T).where(labels_T != _IGNORED, 0.0)
    return torch.stack([losses_T, (choice_T == labels_T).to(wide)]).view(2, *labels_BS.shape)


def _seen(logits_CV: torch.Tensor, local_C: torch.Tensor, first: int) -> torch.Tensor:
    """Return of each position this rank's largest logit, its token, the sum of exponentials and the label's logit.

    ``local_C`` are the labels, counted from this rank's first token. The sum is that of the exponentials of logits less
    the largest one; the label's logit is 0 where another rank holds the label.
    """
    if logits_CV.shape[1] == 0:
        nothing_C = logits_CV.new_zeros(len(logits_CV))
        return torch.stack([torch.full_like(nothing_C, -torch.inf), nothing_C, nothing_C, nothing_C])
    highest_C = logits_CV.amax(1)
    inside_C = (local_C >= 0) & (local_C < logits_CV.shape[1])
    target_C = logits_CV.gather(1, local_C.where(inside_C, 0)[:, None])[:, 0].where(inside_C, 0.0)
    sums_C = (logits_CV - highest_C[:, None]).exp().sum(1)
    # Numbers of tokens are exact in float32 up to 2**24.
    return torch.stack([highest_C, logits_CV.argmax(1).to(logits_CV.dtype) + first, sums_C, target_C])
