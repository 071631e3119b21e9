"""Renders a TrainJob (trainer.kubeflow.org/v1alpha1) for Kubeflow Trainer 2.2 and later (``runtimePatches``).

A TrainJob's runtime, a JobSet template of the cluster's administrator, decides on restarts and on everything else that
a patch cannot change. The container of the runtime's replicated job ``node`` is also called ``node``.
"""

from __future__ import annotations

from partool.render.job import Job
from partool.render.k8s import placement
from partool.render.k8s.environment import environment
from partool.render.k8s.manifest import Fields, Object
from partool.render.k8s.objects import NODE, key_variable, workload_metadata
from partool.render.k8s.pod import (
    PodPlace,
    command,
    container_security,
    grace_s,
    pod_metadata,
    pod_options,
    pod_security,
)
from partool.render.k8s.resources import resources
from partool.render.k8s.volumes import volumes

REMARKS = (
    "A TrainJob leaves to its runtime (a ClusterTrainingRuntime) what it cannot patch: restarts and exit codes,",
    "the deletion of finished jobs, the service account's token, the host's network.",
)


def place(job: Job) -> PodPlace:
    """Return the variables and DNS name by which the pods find each other, as in a JobSet with the TrainJob's name."""
    return PodPlace("JOB_COMPLETION_INDEX", f"{job.run_id}-{NODE}-0-0.{job.run_id}")


def objects(job: Job) -> list[Object]:
    """Return the TrainJob."""
    k8s = job.plan.launch.k8s
    spec: Fields = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": k8s.runtime},
        "trainer": _trainer(job),
        "runtimePatches": [{"manager": "partool", "trainingRuntimeSpec": {"template": {"spec": _patch(job)}}}],
    }
    if k8s.deadline_s is not None:
        spec["activeDeadlineSeconds"] = k8s.deadline_s
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": workload_metadata(job),
            "spec": spec,
        }
    ]


def _trainer(job: Job) -> Fields:
    plan = job.plan
    trainer: Fields = {
        "image": plan.launch.image,
        "command": command(job, place(job)),
        "numNodes": plan.devices.nodes,
        "numProcPerNode": plan.devices.per_node,
        "resourcesPerNode": resources(plan),
    }
    if variables := environment(plan) + key_variable(job):
        trainer["env"] = variables
    return trainer


def _patch(job: Job) -> Fields:
    plan = job.plan
    pod_volumes, mounts = volumes(job)
    spec: Fields = {
        "terminationGracePeriodSeconds": grace_s(plan),
        "nodeSelector": placement.node_selector(plan),
        "securityContext": pod_security(plan),
        **pod_options(plan),
    }
    if tolerations := placement.tolerations(plan):
        spec["tolerations"] = tolerations
    spec["containers"] = [
        {"name": NODE, "securityContext": container_security(plan), "volumeMounts": mounts},
    ]
    spec["volumes"] = pod_volumes
    pods = {"metadata": pod_metadata(job), "spec": spec}
    return {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": pods}}}]}
