"""The table of renderers."""

from __future__ import annotations

import importlib
from typing import cast

from partool.render.job import Job, Rendered

RENDERERS = {
    "torchrun": "partool.render.torchrun",
    "slurm": "partool.render.slurm",
    "k8s": "partool.render.k8s",
}
"""Target → module with ``render(job) -> Rendered``, imported only when it is used."""


def render(target: str, job: Job) -> Rendered:
    """Return what a target submits for a job whose plan has passed ``check_launch``: the same job, the same text."""
    return cast(Rendered, importlib.import_module(RENDERERS[target]).render(job))
