"""From the text of a spec to what the planner makes of it; an error is the test's failure, with the findings."""

from __future__ import annotations

from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan
from partool.planner import PlanResult, make_plan
from partool.planner.problem import Problem
from partool.planner.resolve import resolve
from partool.spec import load_text
from partool.spec.spec import Spec

FOLDER = Path("/base")
"""Where a spec's relative paths start, and where nothing is."""


def spec_of(text: str, *overrides: str) -> Spec:
    """Return the spec of a text, with ``key=value`` over it."""
    loaded = load_text(text, overrides=list(overrides))
    assert loaded.spec is not None, loaded.diagnostics
    return loaded.spec


def result_of(text: str, *overrides: str, folder: Path = FOLDER, name: str = "test") -> PlanResult:
    """Return what the planner says of it: a plan or none, and the findings."""
    return make_plan(spec_of(text, *overrides), base_dir=folder, default_name=name)


def plan_of(text: str, *overrides: str, folder: Path = FOLDER, name: str = "test") -> Plan:
    """Return its plan."""
    result = result_of(text, *overrides, folder=folder, name=name)
    assert result.plan is not None, result.diagnostics
    return result.plan


def problem_of(text: str, *overrides: str, folder: Path = FOLDER) -> Problem:
    """Return what the planner is to solve."""
    found = resolve(spec_of(text, *overrides), folder)
    assert found.problem is not None, found.diagnostics
    return found.problem


def checked(text: str, *, folder: Path = FOLDER) -> list[Diagnostic]:
    """Return what is found in it before a layout is searched for."""
    loaded = load_text(text)
    return [*loaded.diagnostics, *([] if loaded.spec is None else resolve(loaded.spec, folder).diagnostics)]


def findings_of(text: str, *, folder: Path = FOLDER, name: str = "test") -> list[Diagnostic]:
    """Return everything that is found in it, by the loader and by the planner."""
    loaded = load_text(text)
    if loaded.spec is None:
        return loaded.diagnostics
    return [*loaded.diagnostics, *make_plan(loaded.spec, base_dir=folder, default_name=name).diagnostics]
