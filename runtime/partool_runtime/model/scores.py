"""Log-probabilities of single labels, and whether each is the model's first choice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from partool_runtime.model.norm import wide_dtype

_IGNORED = -100


def scores(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """Return of each label its loss in nats, and 1 if its logit is the first of the largest, else 0: ``[2, T]``.

    Both are 0 where the label is ignored. The result is in float32 or wider, and has no gradient.
    """
    wide_TV = logits_TV.detach().to(wide_dtype(logits_TV.dtype))
    losses_T = F.cross_entropy(wide_TV, labels_T, ignore_index=_IGNORED, reduction="none")
    return torch.stack([losses_T, (wide_TV.argmax(1) == labels_T).to(losses_T.dtype)])


def scores_in_chunks(
    part: Callable[[slice], torch.Tensor], labels_BS: torch.Tensor, rows: int, vocabulary: int
) -> torch.Tensor:
    """Return the :func:`scores` of all positions, ``[2, B, S]``.

    ``part`` returns the logits of some positions. At most ``rows`` positions' logits exist at once, and if that is 0 at
    most 2²⁶ logits, of ``vocabulary`` per position.
    """
    labels_T = labels_BS.flatten()
    rows = rows or max(1, 2**26 // max(1, vocabulary))
    pieces = (slice(start, start + rows) for start in range(0, len(labels_T), rows))
    return torch.cat([scores(part(piece), labels_T[piece]) for piece in pieces], 1).view(2, *labels_BS.shape)
