"""Checks of bases of few bits."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.planner.problem import Problem

_BASE = ("adapter", "base")


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about a base that the model cannot have, and about a setting without effect."""
    adapter = problem.spec.adapter
    if adapter is None:
        return
    if adapter.base != "bf16" and problem.described is not None:
        message = f"base: {adapter.base} is for partool's own decoder, and other code builds this model"
        help = "use base: bf16, or write model: {config: FOLDER, weights: {source: hf, path: FOLDER}}"
        yield Diagnostic("PT297", message, path=_BASE, help=help)
    elif adapter.base != "bf16" and adapter.kind == "dora":
        message = f"dora needs the norms of the base's rows, and base: {adapter.base} stores them in few bits"
        yield Diagnostic("PT412", message, path=_BASE, help="use base: bf16, or kind: lora")
    elif "double_quant" in adapter.model_fields_set and adapter.base != "nf4" and adapter.kind != "auto":
        message = f"double_quant is about the scales of base: nf4, and the base is {adapter.base}"
        yield Diagnostic("PT299", message, path=("adapter", "double_quant"), help="drop double_quant, or use base: nf4")
