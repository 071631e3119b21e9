"""From the text of a spec to what the planner makes of it; an error is the test's failure, with the findings.

Tests ask for the same plans again and again, so a plan is made once for several tests. A test that asks for it twice
gets two, made one after the other, and a test with ``monkeypatch`` gets plans that no other test has.
"""

from __future__ import annotations

import os
from pathlib import Path

from sharing import SHARING

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan
from partool.planner import PlanResult, make_plan
from partool.planner.problem import Problem
from partool.planner.resolve import resolve
from partool.spec import load_text
from partool.spec.spec import Spec

FOLDER = Path("/base")
"""Where a spec's relative paths start, and where nothing is."""
_MOST = 256
"""Number of results that are kept for other tests: the latest ones."""
_KEPT: dict[object, PlanResult] = {}


def spec_of(text: str, *overrides: str) -> Spec:
    """Return the spec of a text, with ``key=value`` over it."""
    loaded = load_text(text, overrides=list(overrides))
    assert loaded.spec is not None, loaded.diagnostics
    return loaded.spec


def result_of(text: str, *overrides: str, folder: Path = FOLDER, name: str = "test") -> PlanResult:
    """Return what the planner says of it: a plan or none, and the findings."""
    if not SHARING.allowed or folder != FOLDER:
        return make_plan(spec_of(text, *overrides), base_dir=folder, default_name=name)
    key = (text, overrides, name, _environment())
    result = None if key in SHARING.used else _KEPT.pop(key, None)
    if result is None:
        result = make_plan(spec_of(text, *overrides), base_dir=folder, default_name=name)
    SHARING.used.add(key)
    _KEPT[key] = result
    if len(_KEPT) > _MOST:
        del _KEPT[next(iter(_KEPT))]
    return PlanResult(result.plan, [*result.diagnostics])


def _environment() -> frozenset[tuple[str, str]]:
    """Return the environment's variables without those that differ in every test."""
    from processes import MARK

    return frozenset(entry for entry in os.environ.items() if entry[0] not in ("PYTEST_CURRENT_TEST", MARK))


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
    return [*loaded.diagnostics, *result_of(text, folder=folder, name=name).diagnostics]
