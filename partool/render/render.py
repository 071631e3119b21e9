"""The table of renderers."""

from __future__ import annotations

import importlib
from typing import cast

from partool.diagnostics.record import Diagnostic
from partool.render.job import Job, Rendered

RENDERERS = {
    "torchrun": "partool.render.torchrun",
    "slurm": "partool.render.slurm",
    "k8s": "partool.render.k8s",
}
"""Target → module with ``render(job) -> Rendered``, and with ``findings(job)`` where something can be in its way."""


def findings(target: str, job: Job) -> list[Diagnostic]:
    """Return what only shows as a job is written for a target."""
    module = importlib.import_module(RENDERERS[target])
    return cast(list[Diagnostic], module.findings(job)) if hasattr(module, "findings") else []


def render(target: str, job: Job) -> Rendered:
    """Return what a target submits for a job whose plan has passed ``check_launch``: the same job, the same text."""
    return cast(Rendered, importlib.import_module(RENDERERS[target]).render(job))
