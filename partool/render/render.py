"""Renders a job with ``partool.render.<target>``: its ``render(job)`` and, if it can refuse jobs, ``findings(job)``."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import cast

from partool.diagnostics.record import Diagnostic
from partool.render.job import Job, Rendered
from partool.render.shell import UnsafeValueError, variables
from partool.spec.patterns import RunName, fits

_HELP = "give it another name; PARTOOL_HOME sets where runs are kept, and partool plan writes a new plan"


def findings(target: str, job: Job) -> list[Diagnostic]:
    """Return findings that appear only when a job is rendered for a target; a job with errors cannot be rendered."""
    module = _renderer(target)
    try:
        checked(job)
        return cast(list[Diagnostic], module.findings(job)) if hasattr(module, "findings") else []
    except UnsafeValueError as error:
        return [Diagnostic("PT549", str(error), help=_HELP)]


def checked(job: Job) -> Job:
    """Return the job if its names are safe in scripts, manifests and paths; raises UnsafeValueError if not.

    The types of plans also check the names, but do not check a plan that was changed after it was read.
    """
    if not fits(RunName, job.run_id):
        raise UnsafeValueError(f"{job.run_id!r} cannot be the name of a run")
    for plan in (job.plan, *job.tasks, *job.sizes.values()):
        variables(plan)
    return job


def render(target: str, job: Job) -> Rendered:
    """Return the files to submit for a job whose plan has passed ``check_launch``; equal jobs give equal files.

    Raises UnsafeValueError for a name or a value that cannot be written safely; :func:`findings` reports both.
    """
    return cast(Rendered, _renderer(target).render(checked(job)))


def _renderer(target: str) -> ModuleType:
    return importlib.import_module(f"partool.render.{target}")
