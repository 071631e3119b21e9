"""Coefficients of memory for one model, traced by the runtime in a process of its own: no GPU, no weights."""

from __future__ import annotations

from partool.cost.traced import Trace, TraceError, refresh
from partool.planner.problem import Problem

__all__ = ["TraceError", "traced"]


def traced(problem: Problem) -> Trace:
    """Return the trace of a problem's model; raises :class:`TraceError`, which needs torch on this machine to pass."""
    return refresh(problem.model, problem.spec.training.precision, (problem.compile,))
