"""Plans a spec that was read from a file or a text: each finding gets its place there."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan
from partool.planner.make import check_rest, make_plan
from partool.planner.problem import SearchBudget
from partool.spec.loader import Loaded


def plan_loaded(
    loaded: Loaded,
    path: Path,
    *,
    trace: bool = False,
    forgive: Collection[str] = (),
    budget: SearchBudget | None = None,
) -> tuple[Plan | None, list[Diagnostic]]:
    """Return a spec's plan, None after errors, and all findings: those of reading it come first.

    Relative paths of the spec begin at the folder of ``path``, whose name is the plan's where the spec has none. The
    other arguments are those of :func:`partool.planner.make.make_plan`.
    """
    folder = path.absolute().parent
    if loaded.spec is not None and not loaded.has_errors:
        name = name_of(path)
        result = make_plan(loaded.spec, base_dir=folder, default_name=name, trace=trace, forgive=forgive, budget=budget)
        return result.plan, [*loaded.diagnostics, *loaded.source.attach(result.diagnostics)]
    if loaded.rest is not None:
        loaded.add(check_rest(loaded.rest, folder, loaded.diagnostics))
    return None, list(loaded.diagnostics)


def name_of(path: Path) -> str:
    """Return the default name of a run: the file's name without characters that a run's name must not have."""
    slug = re.sub(r"[^a-z0-9]+", "-", path.name.split(".")[0].lower()).strip("-")[:53].rstrip("-")
    return slug or "run"
