"""A model whose rows no rank's cut divides into blocks, and the matrices that its codes stand for."""

from __future__ import annotations

from typing import Any

import torch

from partool.layout.quantised import quantised_names
from partool.plan.types import Plan
from partool.spec.adapter import AdapterSpec
from partool_kernels.quantised.codes import (
    PartPlace,
    packed,
    quantise_int8,
    quantise_nf4,
    quantise_scales,
    reference,
    scales_of,
)

WIDE: dict[str, Any] = {
    "hidden": 70, "heads": 5, "kv_heads": 5, "head_dim": 18, "ffn_hidden": 133, "ffn_bias": True, "out_bias": True
}  # fmt: skip
"""Rows of 70, 90 and 133 elements, of which no rank's columns begin with a block of 64."""
NF4 = AdapterSpec(rank=3, alpha=5.0, base="nf4", train=["head", "norms", "layers.1.ffn.up.*"])


def numbers(plan: Plan, adapter: AdapterSpec, name: str, matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix that the codes of ``matrix`` stand for, or the matrix itself if it is not stored in codes."""
    if name not in quantised_names(plan.model, plan.frozen):
        return matrix
    four = adapter.base == "nf4"
    codes, absmax = (quantise_nf4 if four else quantise_int8)(matrix)
    rows, columns = matrix.shape
    place = PartPlace(columns, (0, columns), ((0, rows),))
    if four and adapter.double_quant:
        absmax = scales_of(*quantise_scales(absmax), place)
    return reference(packed(codes) if four else codes, absmax, place, torch.float64)
