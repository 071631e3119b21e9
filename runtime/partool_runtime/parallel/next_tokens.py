"""The likeliest next tokens, looked up where a pass computes its loss, so that every layout finds them.

A rank that computes losses has the hidden state of its positions and the head, or its rows of the head. While tokens
are looked for, the function in the place of the loss takes the hidden state of the marked positions only: a label that
is not ignored marks a position, and is the number of the prompt whose next token follows there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from partool_runtime.model.loss import IGNORED
from partool_runtime.model.norm import wide_dtype
from partool_runtime.parallel.tensor.ops import start_tokens, tokens
from partool_runtime.parallel.tensor.vocabulary import VocabularyLoss
from partool_runtime.torch_internals.collectives import finished, start_gather


class NextTokens:
    """Looks for next tokens instead of losses, while :meth:`looking`."""

    def __init__(self) -> None:
        self._next_P: torch.Tensor | None = None
        """For each prompt its next token, or −1; None while losses are computed."""

    def around(self, before: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a loss function that looks for next tokens while it is asked to, and else calls ``before``."""
        first = _first(before)

        def loss(*args: Any, **how: Any) -> torch.Tensor:
            if self._next_P is None:
                result: torch.Tensor = before(*args, **how)
                return result
            hidden, *head, labels_BS = args
            at = labels_BS != IGNORED
            if at.any():  # the same on all ranks that share these positions
                self._next_P[labels_BS[at]] = next_tokens(first, hidden, head, at)
            return torch.zeros((), dtype=hidden.dtype, device=hidden.device)

        loss.__wrapped__ = before  # type: ignore[attr-defined]
        return loss

    @contextmanager
    def looking(self, prompts: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield what passes fill: each prompt's next token (int64), −1 where this rank does not compute it."""
        self._next_P = torch.full((prompts,), -1, dtype=torch.int64, device=device)
        try:
            yield self._next_P
        finally:
            self._next_P = None


def _first(loss: Any) -> Any:
    """Return the loss function inside of what other parts have put around it."""
    while True:
        if isinstance(loss, partial):
            loss = loss.func
        elif hasattr(loss, "__wrapped__"):
            loss = loss.__wrapped__
        else:
            return loss


@torch.no_grad()
def next_tokens(loss: Any, hidden: torch.Tensor, head: list[Any], at_BS: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token after each position of the mask ``at_BS``, ``[M]``; of equal ones the first.

    ``hidden`` and ``head`` are what the function ``loss`` gets: the hidden state ``[B, S, H]``, or a share of its
    tokens, and a matrix or a module; or the logits ``[B, S, V]``, and nothing.
    """
    if not head:
        return hidden[at_BS].argmax(-1)
    module: Any = head[0]
    weight_VH, bias_V = (module.weight, module.bias) if isinstance(module, torch.nn.Linear) else (module, None)
    team = getattr(loss, "team", None)
    if team is not None and team.length is not None:
        hidden = tokens(start_tokens(hidden, team), team)
    logits_MV = F.linear(hidden[at_BS], weight_VH, bias_V)
    logits_MV = logits_MV.to(wide_dtype(logits_MV.dtype))
    if team is None:
        return logits_MV.argmax(-1)
    return _of_ranks(logits_MV, loss)


def _of_ranks(logits_MV: torch.Tensor, loss: VocabularyLoss) -> torch.Tensor:
    """Return the likeliest tokens of all ranks, of which each has the logits of the rows from ``loss.first`` on."""
    count, rows = logits_MV.shape
    best_M2 = torch.full((count, 2), -torch.inf, dtype=torch.float64, device=logits_MV.device)
    if rows:
        best_M2[:, 0] = logits_MV.max(-1).values.double().nan_to_num(nan=torch.inf)
        best_M2[:, 1] = (logits_MV.argmax(-1) + loss.first).double()
    team = loss.team
    of_ranks_RM2 = finished(start_gather(best_M2, team.ranks, team.group_name)).view(team.ranks, count, 2)
    values_RM, tokens_RM = of_ranks_RM2.unbind(-1)
    likeliest_RM = values_RM == values_RM.max(0).values
    return tokens_RM.where(likeliest_RM, torch.inf).min(0).values.long()
