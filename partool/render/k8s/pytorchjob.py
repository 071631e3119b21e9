"""Renders a PyTorchJob (kubeflow.org/v1) of the Training Operator 1.x; node 0 is the master, other nodes are workers.

The operator has no gang restart. Under the restart policy OnFailure, the kubelet restarts a failed agent in its
pod; since all agents of a run end with the same code, all of them restart.
"""

from __future__ import annotations

from partool.render.job import Job
from partool.render.k8s.manifest import Fields, Object
from partool.render.k8s.objects import int32, workload_metadata
from partool.render.k8s.pod import PodPlace, template

REMARKS = (
    "A PyTorchJob knows neither exit codes nor a restart of all pods together: the kubelet starts the agents again,",
    "which end together, whatever their exit code, until restarts are used up; without any, the first end is final.",
)


def place(job: Job) -> PodPlace:
    """Return the variables and DNS name by which the pods find each other.

    The operator prescribes the names of the container and of its port.
    """
    return PodPlace("RANK", f"{job.run_id}-master-0", container="pytorch", port="pytorchjob-port")


def objects(job: Job) -> list[Object]:
    """Return the PyTorchJob; its operator makes the Services."""
    nodes = job.plan.devices.nodes
    replicas = {"Master": _replicas(job, 1)}
    if nodes > 1:
        replicas["Worker"] = _replicas(job, nodes - 1)
    spec: Fields = {
        "nprocPerNode": str(job.plan.devices.per_node),
        "runPolicy": _run_policy(job),
        "pytorchReplicaSpecs": replicas,
    }
    return [
        {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": workload_metadata(job), "spec": spec},
    ]


def _run_policy(job: Job) -> Fields:
    """Return the field ``runPolicy`` of the job: limits on restarts and time, and what is deleted at the end.

    The operator sums the restarts of all pods, and ends the job at ``backoffLimit``.
    """
    nodes, launch = job.plan.devices.nodes, job.plan.launch
    policy: Fields = {
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": int32(launch.k8s.keep_finished_s),
    }
    if launch.restarts:
        policy["backoffLimit"] = int32(launch.restarts * nodes + 1)
    if launch.k8s.deadline_s is not None:
        policy["activeDeadlineSeconds"] = launch.k8s.deadline_s
    return policy


def _replicas(job: Job, count: int) -> Fields:
    policy = "OnFailure" if job.plan.launch.restarts else "Never"
    return {"replicas": count, "restartPolicy": policy, "template": template(job, place(job), restart_policy=None)}
