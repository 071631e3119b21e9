"""Attention along the rows or columns of a grid of tokens (axial attention, arXiv 1912.12180, section 3).

Every row, or column, becomes a sequence of its own: no mask of all tokens exists, and work grows with the length of a
row instead of the whole sequence. Tokens lie row by row, so the order within a column is that of the sequence, too.
"""

from __future__ import annotations

import torch

from partool.layout.grid import Axis


def folded(x_BNSD: torch.Tensor, axis: Axis, grid: tuple[int, int]) -> torch.Tensor:
    """Return the lines of S tokens as sequences of their own, ``[B · lines, N, length of a line, D]``.

    The S tokens are whole rows of a grid of ``(rows, columns)``, or whole columns, whichever ``axis`` says: all of
    them or a part.
    """
    batch, heads, count, dim = x_BNSD.shape
    x_BRCND = x_BNSD.transpose(1, 2).reshape(batch, *_lines(count, axis, grid), heads, dim)
    x_BXLND = x_BRCND if axis == "row" else x_BRCND.transpose(1, 2)
    return x_BXLND.flatten(0, 1).transpose(1, 2)


def unfolded(x_XNLD: torch.Tensor, batch: int, axis: Axis) -> torch.Tensor:
    """Return what :func:`folded` has taken apart, ``[B, N, S, D]``."""
    lines, heads, length, dim = x_XNLD.shape
    # Tokens before heads in memory, as the output projection wants them: columns are copied once, rows not at all.
    x_BXLND = x_XNLD.transpose(1, 2).reshape(batch, lines // batch, length, heads, dim)
    x_BRCND = x_BXLND if axis == "row" else x_BXLND.transpose(1, 2)
    return x_BRCND.reshape(batch, -1, heads, dim).transpose(1, 2)


def folded_documents(documents_BS: torch.Tensor, axis: Axis, grid: tuple[int, int]) -> torch.Tensor:
    """Return the documents' numbers of the same lines, ``[B · lines, length of a line]``."""
    documents_BRC = documents_BS.reshape(documents_BS.shape[0], *_lines(documents_BS.shape[1], axis, grid))
    return (documents_BRC if axis == "row" else documents_BRC.transpose(1, 2)).flatten(0, 1)


def _lines(tokens: int, axis: Axis, grid: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns that some tokens are."""
    rows, columns = grid
    return (tokens // columns, columns) if axis == "row" else (rows, tokens // rows)
