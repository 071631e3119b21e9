"""Renders a Volcano Job (batch.volcano.sh/v1alpha1), whose pods are placed together and restart together.

``maxRetry`` counts every restart of the job, including restarts after a preemption. It is unlimited if no restarts
after failures are requested; otherwise failures and preemptions both count against ``maxRetry``.
"""

from __future__ import annotations

from partool.render.job import Job
from partool.render.k8s.manifest import Fields, Object
from partool.render.k8s.objects import (
    EXIT_CONFIGURATION,
    EXIT_PREEMPTED,
    MOST_INT32,
    NODE,
    int32,
    workload_metadata,
)
from partool.render.k8s.pod import PodPlace, template

REMARKS = ("A Volcano Job counts every restart against maxRetry, after a failure and after a preemption alike.",)


def place(job: Job) -> PodPlace:
    """Return the variable (of the plugin ``env``) and DNS name (of ``svc``) by which the pods find each other."""
    return PodPlace("VC_TASK_INDEX", f"{job.run_id}-{NODE}-0.{job.run_id}")


def objects(job: Job) -> list[Object]:
    """Return the Job; Volcano makes the headless Service."""
    nodes, launch = job.plan.devices.nodes, job.plan.launch
    spec: Fields = {
        "schedulerName": "volcano",
        "minAvailable": nodes,
        "maxRetry": int32(launch.restarts + 1) if launch.restarts else MOST_INT32,
        "ttlSecondsAfterFinished": int32(launch.k8s.keep_finished_s),
        "plugins": {"env": [], "svc": []},
        "policies": _policies(launch.restarts),
        "tasks": [{"name": NODE, "replicas": nodes, "template": template(job, place(job))}],
    }
    if launch.k8s.queue is not None:
        spec["queue"] = launch.k8s.queue
    if launch.k8s.priority is not None:
        spec["priorityClassName"] = launch.k8s.priority
    return [
        {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "metadata": workload_metadata(job),
            "spec": spec,
        }
    ]


def _policies(restarts: int) -> list[Fields]:
    """Return the actions for a pod that ends; the first matching policy applies."""
    return [
        {"exitCode": EXIT_CONFIGURATION, "action": "TerminateJob"},
        {"exitCode": EXIT_PREEMPTED, "action": "RestartJob"},
        {"event": "PodEvicted", "action": "RestartJob"},
        {"event": "PodFailed", "action": "RestartJob" if restarts else "TerminateJob"},
    ]
