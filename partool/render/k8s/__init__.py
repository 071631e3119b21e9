"""Renders a plan as a JobSet, Indexed Job, PyTorchJob, TrainJob or Volcano Job, and a ConfigMap that holds the plan."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from partool.plan.run import PLAN_FILE
from partool.render.job import FOLDER, Job, Rendered
from partool.render.k8s.manifest import Object, text
from partool.render.k8s.objects import agents_key, config_map, key_remark, network_policy
from partool.render.k8s.rules import findings

MANIFEST = "manifest.yaml"
KINDS = {
    "jobset": "partool.render.k8s.jobset",
    "job": "partool.render.k8s.job",
    "pytorchjob": "partool.render.k8s.pytorchjob",
    "trainjob": "partool.render.k8s.trainjob",
    "volcano": "partool.render.k8s.volcano",
}
"""``launch.k8s.kind`` → module with ``objects(job)`` and ``REMARKS``, imported only when used."""

__all__ = ["KINDS", "MANIFEST", "agents_key", "findings", "objects", "render"]


def render(job: Job) -> Rendered:
    """Return ``manifest.yaml``, to be submitted, and the plan's file; requires that :func:`findings` has no errors."""
    remarks: tuple[str, ...] = importlib.import_module(KINDS[job.plan.launch.k8s.kind]).REMARKS
    documents, plan = objects(job), job.plan.to_json()
    return Rendered(
        MANIFEST,
        {
            MANIFEST: text(documents, (*remarks, *_ownership([*agents_key(job), *documents]), *key_remark(job))),
            PLAN_FILE: plan,
        },
        f"kubectl apply -f {FOLDER}/{MANIFEST}",
    )


def objects(job: Job) -> list[Object]:
    """Return the documents of the manifest in order of creation; each object follows the objects to which it refers."""
    kind = importlib.import_module(KINDS[job.plan.launch.k8s.kind])
    policy = [network_policy(job)] if job.plan.launch.k8s.network_policy else []
    return [config_map(job), *policy, *kind.objects(job)]


def _ownership(documents: Sequence[Object]) -> tuple[str, ...]:
    """Return remarks on how to make the job the owner of the other objects, which needs the created job's uid."""
    *others, job = documents
    kind, name, space = job["kind"], job["metadata"]["name"], job["metadata"].get("namespace")
    kubectl = f"kubectl -n {space}" if space else "kubectl"
    resource = f"{kind.lower()}.{job['apiVersion'].partition('/')[0]}"
    owner = f'{{"apiVersion":"{job["apiVersion"]}","kind":"{kind}","name":"{name}","uid":"\'$uid\'"}}'
    named = " ".join(f"{each['kind'].lower()}/{each['metadata']['name']}" for each in others)
    return (
        "The other objects are deleted with the job, ttl included, once it owns them: partool launch sees to that, and",
        "after kubectl apply these lines do:",
        f"  uid=$({kubectl} get {resource} {name} -o jsonpath={{.metadata.uid}})",
        f"  for each in {named}; do",
        f'    {kubectl} patch $each --type=merge -p \'{{"metadata":{{"ownerReferences":[{owner}]}}}}\'',
        "  done",
    )
