"""Coefficients of memory for one model, traced by the runtime in a process of its own: no GPU, no weights."""

from __future__ import annotations

from partool.cost.traced import Trace, TraceError, refresh
from partool.planner.kernels.fused import fused
from partool.planner.problem import Problem
from partool.spec.parallel import Compile
from partool.spec.training import Fused

__all__ = ["TraceError", "traced"]


def traced(problem: Problem) -> Trace:
    """Return the trace of a problem's model; raises :class:`TraceError`, which needs torch on this machine to pass."""
    compiles: tuple[Compile, ...] = ("block", "none") if problem.compiles_later else (problem.compile,)
    parts: dict[Compile, tuple[Fused, ...]] = {compile: fused(problem, compile) for compile in compiles}
    return refresh(problem.model, problem.spec.training.precision, compiles, parts)
