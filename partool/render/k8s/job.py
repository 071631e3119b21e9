"""Renders an Indexed Job (batch/v1) with a headless Service, for Kubernetes 1.29 and later without add-ons.

A Job restarts pods one by one, never all together. Gang restarts work nevertheless, because the agents of a run end
together: when one fails, all end with the same exit code, so every index fails once per failure of the run, and every
index gets a new pod. ``backoffLimitPerIndex`` is then the number of the run's restarts, and the first index that has
used up this number ends the Job (``maxFailedIndexes: 0``). With N nodes, one limit for all pods (``backoffLimit``)
would be used up N times faster. A pod keeps its index and name, so the new agents meet at the old agents' address.
"""

from __future__ import annotations

from partool.render.job import Job
from partool.render.k8s.manifest import Fields, Object
from partool.render.k8s.objects import (
    EXIT_CONFIGURATION,
    EXIT_PREEMPTED,
    disruption_rule,
    exit_code_rule,
    headless_service,
    int32,
    workload_metadata,
)
from partool.render.k8s.pod import PodPlace, template

REMARKS = ()


def place(job: Job) -> PodPlace:
    """Return the variables and DNS name by which the pods find each other."""
    return PodPlace("JOB_COMPLETION_INDEX", f"{job.run_id}-0.{job.run_id}")


def objects(job: Job) -> list[Object]:
    """Return the Service and the Job; for a single pod, only the Job, because no Service is needed."""
    services = [headless_service(job)] if job.plan.devices.nodes > 1 else []
    return [
        *services,
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": workload_metadata(job), "spec": _spec(job)},
    ]


def _spec(job: Job) -> Fields:
    nodes, k8s = job.plan.devices.nodes, job.plan.launch.k8s
    rules = [
        exit_code_rule("FailJob", EXIT_CONFIGURATION),
        exit_code_rule("Ignore", EXIT_PREEMPTED),
        disruption_rule("Ignore"),
    ]
    spec: Fields = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimitPerIndex": int32(job.plan.launch.restarts),
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "ttlSecondsAfterFinished": int32(k8s.keep_finished_s),
    }
    if k8s.deadline_s is not None:
        spec["activeDeadlineSeconds"] = k8s.deadline_s
    return spec | {"template": template(job, place(job), subdomain=job.run_id if nodes > 1 else None)}
