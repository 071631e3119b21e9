"""Findings about settings that have no effect in the layout that the planner chose."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.plan.layout import Layout
from partool.planner.forms.gathers import sharing_ranks
from partool.planner.problem import Problem
from partool.planner.rules.tensor import unused_settings

_DATA = ("parallel", "data")


def gathers(problem: Problem, layout: Layout) -> Iterator[Diagnostic]:
    """Yield findings about settings for all-gathers that have no effect in the layout that the planner chose."""
    data, shared = problem.spec.parallel.data, sharing_ranks(layout) > 1
    if data.zero not in ("auto", 3):
        return  # reported before the search
    chosen = f"ZeRO-{layout.data.zero}" if shared else "no ranks that share parameters"
    for name in ("prefetch", "persistent"):
        if getattr(data, name) != "auto" and not (layout.data.zero == 3 and shared):
            message = f"{name}: {getattr(data, name)} is about parameters that ZeRO-3 gathers; the plan has {chosen}"
            yield Diagnostic("PT460", message, severity="warning", path=(*_DATA, name), help="drop it, or use zero: 3")
    if data.gather == "sequential" and not (layout.data.zero > 0 and shared):
        message = f"gather: sequential, but the plan has {chosen}, and gathers nothing"
        yield Diagnostic("PT460", message, severity="warning", path=(*_DATA, "gather"), help="drop it, or use zero: 3")


def tensor(problem: Problem, layout: Layout) -> Iterator[Diagnostic]:
    """If the planner chose one tensor rank, yield a warning for each setting that needs several tensor ranks."""
    if problem.tensor_degree == "auto" and layout.mesh.tp == 1:
        yield from unused_settings(problem, "the plan has one")
