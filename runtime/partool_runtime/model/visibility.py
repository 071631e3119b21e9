"""The rule for which tokens attend to which; the masks of every attention method follow from it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from partool.layout.grid import Axis


class AttentionLayout(NamedTuple):
    """Rule for which tokens a token of a layer attends to: all earlier tokens, unless a field restricts them."""

    window: int | None
    """Number of tokens that a token attends to, including itself; None means all earlier tokens."""
    axis: Axis | None = None
    """Direction on a grid of tokens: a token sees only tokens in its row, or only tokens in its column."""
    scale: float | None = None
    """Number by which products of queries and keys are multiplied; None means 1 / √D."""


def visible(
    queries_Q: torch.Tensor,
    keys_K: torch.Tensor,
    layout: AttentionLayout,
    *,
    documents: tuple[torch.Tensor, torch.Tensor] | None = None,
    columns: int = 0,
) -> torch.Tensor:
    """Return a boolean mask, True for the keys that a query sees, ``[Q, K]``; with documents ``[B, 1, Q, K]``.

    ``queries_Q`` and ``keys_K`` are positions in the sequence; ``documents`` are the document numbers of queries ``[B,
    Q]`` and of keys ``[B, K]``; ``columns`` is the length of a row of the grid.
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
