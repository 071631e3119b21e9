"""Checks that the user's kernel tables can be read, and that configurations are as certain as the spec requires."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan
from partool.spec.training import KernelsSpec

if TYPE_CHECKING:
    from partool.planner.kernels.choose import Coverage


def check_kernels(plan: Plan, forgive: Collection[str] = ()) -> list[Diagnostic]:
    """Return findings about tables that cannot be read, and about products with too uncertain configurations.

    The spec says how certain the configuration of a matrix product has to be.

    Errors whose codes are in ``forgive`` become warnings. Commands that list or measure uncertain products forgive
    PT491. The tuning command forgives PT492, because it may still write a missing table. A table that exists and cannot
    be read stays an error.
    """
    if not plan.kernels.tuned and plan.kernels.require == "heuristic":
        return []
    from partool.planner.kernels.choose import coverage
    from partool_kernels.registry.tables import TableError

    missing = list(_missing(plan))
    if missing and "PT492" not in forgive:
        return missing
    present = plan.model_copy(update={"kernels": without_missing(plan.kernels)})
    try:
        covered = coverage(present)
    except TableError as error:
        message = f"{error.path} cannot be used: {error.problem}"
        help = "partool tune writes such tables; those of ROCm/aiter and vLLM are read as they are"
        return [Diagnostic("PT492", message, path=("kernels", "tuned"), help=help)]
    doubts = [
        Diagnostic("PT493", doubt, "warning", ("kernels", "tuned"), help="measure it again, or take the row out")
        for doubt in covered.doubts
    ]
    findings = [*missing, *doubts, *_below(plan, covered)]
    return [replace(one, severity="warning") if one.code in forgive else one for one in findings]


def without_missing(kernels: KernelsSpec) -> KernelsSpec:
    """Return a copy of the section whose ``tuned`` lists only the tables that exist."""
    return kernels.model_copy(update={"tuned": [path for path in kernels.tuned if Path(path).exists()]})


def _missing(plan: Plan) -> Iterator[Diagnostic]:
    for place, path in enumerate(plan.kernels.tuned):
        if not Path(path).exists():
            help = "a file or a folder with configurations; partool tune SPEC --out FOLDER writes one"
            yield Diagnostic("PT492", f"there is no {path}", path=("kernels", "tuned", place), help=help)


def _below(plan: Plan, covered: Coverage) -> Iterator[Diagnostic]:
    level = plan.kernels.require
    below = covered.below(level)
    if not below:
        return
    products = [line for line in covered.lines if line.asked.product and line.tabled]
    share = sum(line.share for line in below)
    slowest = max(below, key=lambda line: (line.total_s, line.asked.name))
    m, n, k = slowest.asked.sides
    source = slowest.choice.source if slowest.choice else ""
    message = (
        f"{len(below)} of {len(products)} matrix products ({share:.1%} of a step) have a configuration below require: "
        f"{level}; {slowest.asked.name} ({slowest.asked.part}, {m:.0f} × {n} × {k}) has {source}"
    )
    help = f"partool plan --show kernels lists them, partool tune measures them; or write require: {covered.worst}"
    yield Diagnostic("PT491", message, path=("kernels", "require"), help=help)
