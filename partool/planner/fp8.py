"""Findings about ``precision: fp8``: which layers of a layout stay in 16 bits."""

from __future__ import annotations

from partool.diagnostics.record import Diagnostic
from partool.layout.fp8 import MULTIPLE
from partool.layout.gemms import gemms
from partool.plan.types import Layout
from partool.planner.problem import Problem

_WIDE = ("head", "moe.router")
"""Products that always do."""


def stay_wide(problem: Problem, layout: Layout) -> list[Diagnostic]:
    """Return a finding where widths of layers, as a rank holds them, are such that matrix units do not take them."""
    if problem.spec.training.precision != "fp8":
        return []
    ranks = layout.mesh.tp
    every = gemms(problem.model, tensor=ranks, inner=layout.tensor_inner, expert=layout.expert, tokens=1)
    products = [one for one in every if one.name not in _WIDE]
    odd = [one for one in products if one.n % MULTIPLE or one.k % MULTIPLE]
    if not odd:
        return []
    named = ", ".join(f"{one.name} ({one.n} x {one.k})" for one in odd)
    where = f" on each of {ranks} tensor ranks" if ranks > 1 else ""
    message = f"precision: fp8, but {named}{where} stay in bf16: their widths are no multiples of {MULTIPLE}"
    everything = len(odd) == len(products)
    help = "write precision: bf16" if everything else f"choose widths that are multiples of {MULTIPLE}, best of 128"
    return [Diagnostic("PT490", message, severity="warning", path=("training", "precision"), help=help)]
