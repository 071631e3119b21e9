"""Parts that all kinds of jobs share: names, labels, the ConfigMap with the plan, the headless Service."""

from __future__ import annotations

import json
import re
import secrets

from partool.plan.run import KEY_VARIABLE, PLAN_FILE
from partool.render.job import Job
from partool.render.k8s.environment import origins
from partool.render.k8s.manifest import Fields, Metadata, Object
from partool.spec.targets.k8s.section import LABEL_DOMAIN

PORT = 29500
"""Port of the store at which the agents of the nodes meet."""
NODE = "node"
"""Name that partool gives the replicated job, the task and the container."""
MOST_INT32 = 2**31 - 1
RUN_LABEL = f"{LABEL_DOMAIN}/run"
HASH_ANNOTATION = f"{LABEL_DOMAIN}/plan-hash"
ORIGINS_ANNOTATION = f"{LABEL_DOMAIN}/environment-origins"
KEY_NAME = "key"
"""Name of the Secret's entry that holds the agents' key."""
_KEY_ORIGIN = "partool: what the agents of the nodes sign their messages with; a Secret of the run"


def int32(value: int) -> int:
    """Return ``value``, capped at the largest value of a 32-bit field; this largest value means no limit."""
    return min(value, MOST_INT32)


def plan_map(job: Job) -> str:
    """Return the name of the ConfigMap with the plan."""
    return f"{job.run_id}-plan"


def labels(job: Job) -> dict[str, str]:
    """Return the labels of every object and of the pods; the user's labels override the descriptive labels.

    Names: https://kubernetes.io/docs/concepts/overview/working-with-objects/common-labels/.
    """
    described = {
        "app.kubernetes.io/name": "partool",
        "app.kubernetes.io/instance": job.run_id,
        "app.kubernetes.io/version": re.sub(r"[^A-Za-z0-9.]", "-", job.plan.partool_version),
        "app.kubernetes.io/component": "training",
    }
    fixed = {"app.kubernetes.io/managed-by": "partool", RUN_LABEL: job.run_id}
    return {**described, **job.plan.launch.k8s.labels, **fixed}


def metadata(job: Job, name: str | None = None) -> Metadata:
    """Return the metadata of an object of the run; ``name`` defaults to the run's id."""
    fields: Metadata = {"name": name or job.run_id}
    if job.plan.launch.k8s.namespace is not None:
        fields["namespace"] = job.plan.launch.k8s.namespace
    fields["labels"] = labels(job)
    fields["annotations"] = {**job.plan.launch.k8s.annotations, HASH_ANNOTATION: job.plan.hash}
    return fields


def workload_metadata(job: Job) -> Metadata:
    """Return the metadata of the object that runs the pods, with Kueue's labels and the origin of each variable.

    ``suspend`` is left to Kueue, which sets it when the object is created.
    """
    fields = metadata(job)
    k8s = job.plan.launch.k8s
    if k8s.queue is not None and k8s.kind != "volcano":
        fields["labels"]["kueue.x-k8s.io/queue-name"] = k8s.queue
        if k8s.priority is not None:
            fields["labels"]["kueue.x-k8s.io/priority-class"] = k8s.priority
        if k8s.deadline_s is not None:  # this deadline covers all restarts, unlike a Job's
            fields["labels"].setdefault("kueue.x-k8s.io/max-exec-time-seconds", str(int32(k8s.deadline_s)))
    named = origins(job.plan) | ({KEY_VARIABLE: _KEY_ORIGIN} if _has_key(job) else {})
    fields["annotations"][ORIGINS_ANNOTATION] = json.dumps(named, ensure_ascii=False)
    return fields


def config_map(job: Job) -> Object:
    """Return the ConfigMap that holds the plan; it is immutable."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, plan_map(job)),
        "immutable": True,
        "data": {PLAN_FILE: job.plan.to_json(), **(job.program.files if job.program is not None else {})},
    }


def network_policy(job: Job) -> Object:
    """Return the NetworkPolicy that admits traffic only from the run's pods.

    The policy names no ports: the ranks' connections use any free port. Outgoing traffic is not restricted.
    """
    selector = {"matchLabels": {RUN_LABEL: job.run_id}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job),
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": selector}]}],
        },
    }


def key_secret(job: Job) -> str:
    """Return the name of the Secret with the key that signs agents' messages; the manifest lacks this Secret."""
    return f"{job.run_id}-agents"


def _has_key(job: Job) -> bool:
    return job.plan.devices.nodes > 1 and job.program is None


def key_variable(job: Job) -> list[Fields]:
    """Return the variable that passes the agents their key; empty for a single agent, which has no peers."""
    if not _has_key(job):
        return []
    reference = {"name": key_secret(job), "key": KEY_NAME}
    return [{"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": reference}}]


def agents_key(job: Job) -> list[Object]:
    """Return a Secret with a new key; the Secret is created on the cluster and never written elsewhere."""
    if not _has_key(job):
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata(job, key_secret(job)),
            "type": "Opaque",
            "immutable": True,
            "stringData": {KEY_NAME: secrets.token_hex(32)},
        }
    ]


def key_remark(job: Job) -> tuple[str, ...]:
    """Return a remark for users who create the objects without ``partool launch``, which also makes the Secret."""
    if not _has_key(job):
        return ()
    namespace = f" -n {name}" if (name := job.plan.launch.k8s.namespace) else ""
    return (
        "The agents' key is not written here. partool launch creates it; before kubectl create, once for each run:",
        f"kubectl{namespace} create secret generic {key_secret(job)} --from-literal={KEY_NAME}=$(openssl rand -hex 32)",
    )


def headless_service(job: Job) -> Object:
    """Return the Service that gives each pod a DNS name before the pod is ready: the agents meet by these names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: job.run_id},
            "ports": [{"name": "rendezvous", "port": PORT, "targetPort": PORT, "protocol": "TCP"}],
        },
    }


EXIT_PREEMPTED = 75
EXIT_CONFIGURATION = 78
"""Exit codes with the same values as in :mod:`partool_runtime.errors`, which this package does not import."""


def exit_code_rule(action: str, code: int) -> Fields:
    """Return a rule for a pod whose agent exited with ``code``."""
    return {"action": action, "onExitCodes": {"containerName": NODE, "operator": "In", "values": [code]}}


def disruption_rule(action: str) -> Fields:
    """Return a rule for a pod that the cluster has preempted or evicted."""
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
