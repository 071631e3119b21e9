"""Rules of ``model.attention.grid``, the rows and columns in which a sequence's tokens lie."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.model import LayerPattern
from partool.spec.spec import Spec

_PATH = ("model", "attention")


def check_grid(spec: Spec) -> Iterator[Diagnostic]:
    """Find layers along the axes of no grid, a grid that no layer attends along, and one of another length."""
    attention = spec.model.attention
    if attention is None:
        return
    types = attention.layer_types
    kinds = set((types.pattern if isinstance(types, LayerPattern) else types) or ())
    along = sorted(kinds & {"row", "column"})
    length = spec.training.sequence_length
    if attention.grid is None:
        if along:
            message = f"{' and '.join(along)} layers attend along the axes of a grid, and none is given"
            columns = next(n for n in range(int(length**0.5), 0, -1) if length % n == 0)
            help = f"add grid: [{length // columns}, {columns}], say: rows and columns of a sequence's tokens"
            yield Diagnostic("PT475", message, path=(*_PATH, "layer_types"), help=help)
        return
    rows, columns = attention.grid
    if not along:
        message = f"the tokens lie on a grid of {rows} × {columns}, but no layer attends along its rows or columns"
        help = "add layer_types: {pattern: [row, column]}, or drop the grid"
        yield Diagnostic("PT476", message, path=(*_PATH, "grid"), help=help)
    if rows * columns != length:
        message = f"a grid of {rows} × {columns} holds {rows * columns} tokens, a sequence has {length}"
        help = f"use sequence_length: {rows * columns}"
        yield Diagnostic("PT477", message, path=("training", "sequence_length"), help=help)
