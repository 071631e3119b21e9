"""Which rows of a parameter this rank holds, and what parameters a model has."""

from __future__ import annotations

from partool.layout.parameters import parameters
from partool.spec.model import ModelConfig
from partool_runtime.pieces import local_part, local_rows, split_rows

__all__ = ["local_part", "local_rows", "split_rows", "whole_shapes"]


def whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a model, whichever pipeline rank holds it."""
    return {info.name: info.shape for info in parameters(config)}
