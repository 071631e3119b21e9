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
    """Yield a warning for each setting of tensor ranks that has no effect.

    The planner may have chosen one rank, and projections with an adapter are not overlapped with exchanges.
    """
    if problem.tensor_degree == "auto" and layout.mesh.tp == 1:
        yield from unused_settings(problem, "the plan has one")
        return
    tensor = problem.spec.parallel.tensor
    for name, none in (("overlap", ("auto", "none")), ("chunks", ("auto", 1))):
        if problem.model.adapter is not None and layout.mesh.tp > 1 and (value := getattr(tensor, name)) not in none:
            message = f"{name}: {value} overlaps an exchange with one product, and an adapter adds others to it"
            yield Diagnostic("PT446", message, "warning", ("parallel", "tensor", name), help="drop it")
