"""A plan as objects of Kubernetes: JobSet, Indexed Job, PyTorchJob, TrainJob or Volcano Job, with its ConfigMap."""

from __future__ import annotations

import importlib

from partool.plan.run import PLAN_FILE
from partool.render.job import Job, Rendered
from partool.render.k8s.manifest import text
from partool.render.k8s.objects import Object, config_map
from partool.render.k8s.rules import findings

MANIFEST = "manifest.yaml"
KINDS = {
    "jobset": "partool.render.k8s.jobset",
    "job": "partool.render.k8s.job",
    "pytorchjob": "partool.render.k8s.pytorchjob",
    "trainjob": "partool.render.k8s.trainjob",
    "volcano": "partool.render.k8s.volcano",
}
"""``launch.k8s.kind`` → module with ``objects(job)`` and ``REMARKS``, imported only when it is used."""

__all__ = ["KINDS", "MANIFEST", "findings", "objects", "render"]


def render(job: Job) -> Rendered:
    """Return ``manifest.yaml``, which is submitted, and the plan in it; :func:`findings` has no errors to tell."""
    remarks: tuple[str, ...] = importlib.import_module(KINDS[job.plan.launch.k8s.kind]).REMARKS
    plan = job.plan.to_json()
    return Rendered(MANIFEST, {MANIFEST: text(objects(job), remarks), PLAN_FILE: plan})


def objects(job: Job) -> list[Object]:
    """Return the documents of the manifest in the order in which they are created: what others refer to comes first."""
    kind = importlib.import_module(KINDS[job.plan.launch.k8s.kind])
    return [config_map(job), *kind.objects(job)]
