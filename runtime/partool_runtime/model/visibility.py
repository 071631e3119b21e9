"""Which tokens see which: the one rule that masks of every method of attention come from."""

from __future__ import annotations

from typing import NamedTuple

import torch

from partool.layout.grid import Axis


class AttentionLayout(NamedTuple):
    """Which tokens see which, of a layer: all earlier ones, but for what this leaves out."""

    window: int | None
    """Tokens that one sees, itself included; None sees all earlier ones."""
    axis: Axis | None = None
    """Where tokens lie on a grid: those of its row, or of its column."""


def visible(
    queries_Q: torch.Tensor,
    keys_K: torch.Tensor,
    layout: AttentionLayout,
    *,
    documents: tuple[torch.Tensor, torch.Tensor] | None = None,
    columns: int = 0,
) -> torch.Tensor:
    """Return which keys each query sees, boolean ``[Q, K]``, or ``[B, 1, Q, K]`` with documents.

    Queries and keys are given by their places in the sequence, ``documents`` by the numbers of theirs, ``[B, Q]`` and
    ``[B, K]``; ``columns`` is the length of a row of the grid.
    """
    distance_QK = queries_Q[:, None] - keys_K[None, :]
    seen = distance_QK >= 0
    if layout.window is not None:
        seen &= distance_QK < layout.window
    if layout.axis == "row":
        seen &= (queries_Q // columns)[:, None] == (keys_K // columns)[None, :]
    elif layout.axis == "column":
        seen &= distance_QK % columns == 0
    if documents is None:
        return seen
    of_queries_BQ, of_keys_BK = documents
    return (seen & (of_queries_BQ[:, :, None] == of_keys_BK[:, None, :]))[:, None]
