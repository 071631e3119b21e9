"""Findings about layers whose matrix products stay in 16 bits under ``precision: fp8``."""

from __future__ import annotations

from partool.diagnostics.record import Diagnostic
from partool.layout.gemms import MULTIPLE, gemms
from partool.layout.tensor.structure import Structure
from partool.plan.layout import Layout
from partool.planner.problem import Problem

_WIDE = ("head", "moe.router", "moe.coefficients")
"""Matrix products that always stay in 16 bits."""


def stay_wide(problem: Problem, layout: Layout) -> list[Diagnostic]:
    """Return one finding if some layers cannot be computed in fp8, because of their kind or their widths on a rank.

    The finding is an error if transformers builds the model and no layer has a linear module, as only linear
    modules use fp8.
    """
    if problem.spec.training.precision != "fp8":
        return []
    if problem.described is not None:
        return _of_transformers(problem.described.structure)
    ranks = layout.mesh.tp
    inner, expert, parts = layout.tensor.inner, layout.expert, layout.expert_tensor
    every = gemms(problem.model, tensor=ranks, inner=inner, expert=expert, expert_tensor=parts, tokens=1)
    products = [one for one in every if one.name not in _WIDE]
    odd = [one for one in products if one.n % MULTIPLE or one.k % MULTIPLE]
    if not odd:
        return []
    named = ", ".join(f"{one.name} ({one.n} x {one.k})" for one in odd)
    where = f" on each of {ranks} tensor ranks" if ranks > 1 else ""
    message = f"precision: fp8, but {named}{where} stay in bf16: their widths are no multiples of {MULTIPLE}"
    everything = len(odd) == len(products)
    return [_finding(message, "write precision: bf16" if everything else _WIDTHS)]


_WIDTHS = f"choose widths that are multiples of {MULTIPLE}, best of 128"


def _of_transformers(structure: Structure) -> list[Diagnostic]:
    inside = [m for m in structure.modules if m.name.startswith(f"{structure.blocks}.")]
    linear = [m for m in inside if m.kind == "linear"]
    if not linear:
        message = f"precision: fp8, but layers of {structure.architecture} have no linear modules that could use it"
        return [_finding(message, "write precision: bf16", severity="error")]
    odd = [m for m in linear if any(width % MULTIPLE for width in m.parameters.get("weight", ()))]
    other = [m for m in inside if m.kind in ("conv1d", "experts")]
    if not odd and not other:
        return []
    named = ", ".join(sorted({m.name.rpartition(".")[2] for m in (*odd, *other)}))
    reason = f"widths are no multiples of {MULTIPLE}" if not other else "they are no linear modules of such widths"
    help = (
        "this is how models of transformers run; partool's own decoder has experts in bf16 only" if other else _WIDTHS
    )
    return [_finding(f"precision: fp8, but {named} of every layer stay in bf16: {reason}", help)]


def _finding(message: str, help: str, *, severity: str = "warning") -> Diagnostic:
    path = ("training", "precision")
    if severity == "error":
        return Diagnostic("PT490", message, path=path, help=help)
    return Diagnostic("PT490", message, severity="warning", path=path, help=help)
