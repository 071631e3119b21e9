"""Builds the pod template: each pod runs the agent of one node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partool.plan.run import PLAN_FILE, agent_command
from partool.plan.types import Plan
from partool.render.job import Job
from partool.render.k8s import placement
from partool.render.k8s.environment import environment, literal
from partool.render.k8s.manifest import Fields
from partool.render.k8s.objects import NODE, PORT, key_variable, labels
from partool.render.k8s.resources import resources
from partool.render.k8s.volumes import PLAN_FOLDER, volumes
from partool.spec.targets.k8s.rules import POD_STORAGE

_LINGER_S = 30
"""Seconds that the agent gets to write its summary, after the shutdown timeout has killed its ranks."""
_TERMINATION_LOG = "/dev/termination-log"
_UNMOVED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Annotations that keep autoscalers from moving a pod, because a moved pod restarts all pods. Sources: the cluster
autoscaler's FAQ, "What types of pods can prevent CA from removing a node?";
https://karpenter.sh/docs/concepts/disruption/."""


@dataclass(frozen=True, slots=True)
class PodPlace:
    """Variables and DNS name by which the pods of a kind of job find each other, and names that this kind requires."""

    node_rank: str
    """Variable that holds the pod's number, from 0; the controller of the kind of job sets it."""
    host: str
    """DNS name of the pod with number 0."""
    container: str = NODE
    port: str = "rendezvous"


def run_folder(job: Job) -> str:
    """Return the path of the run's folder in the pod."""
    return f"{POD_STORAGE}/runs/{job.run_id}"


def command(job: Job, place: PodPlace) -> list[str]:
    """Return the agent's command line. It starts no shell, because a shell as process 1 would not pass on signals.

    For another training system, return the command that starts a node's ranks by its script.
    """
    several = job.plan.devices.nodes > 1
    if job.program is not None:
        meet = {"NODE_RANK": f"$({place.node_rank})", "MASTER_ADDR": place.host, "MASTER_PORT": PORT} if several else {}
        assignments = [f"{name}={value}" for name, value in meet.items()]
        return ["env", *assignments, "bash", f"{PLAN_FOLDER}/{job.program.script}"]
    return agent_command(
        literal(job.plan.launch.python or "python"),
        Path(PLAN_FOLDER, PLAN_FILE),
        Path(run_folder(job)),
        resume=True,
        plan_hash=job.plan.hash,
        nodes=job.plan.devices.nodes if several else None,
        node_rank=f"$({place.node_rank})" if several else None,
        rendezvous=f"{place.host}:{PORT}" if several else None,
        echo="all",
        termination_log=_TERMINATION_LOG,
    )


def template(
    job: Job, place: PodPlace, *, restart_policy: str | None = "Never", subdomain: str | None = None
) -> Fields:
    """Return the pod template; ``restart_policy`` is None if the policy is a field of the job instead of the pod."""
    return {"metadata": pod_metadata(job), "spec": _spec(job, place, restart_policy, subdomain)}


def pod_metadata(job: Job) -> Fields:
    """Return labels and annotations of the pods; a label refuses Istio's sidecar, which would outlive the agent."""
    fields: Fields = {"labels": {"sidecar.istio.io/inject": "false", **labels(job)}}
    k8s = job.plan.launch.k8s
    annotations = {**({} if k8s.evictable else _UNMOVED), **k8s.annotations, **placement.topology_annotations(job.plan)}
    return fields | ({"annotations": annotations} if annotations else {})


def grace_s(plan: Plan) -> int:
    """Return the pod's grace period: the seconds between its stop signal and its end."""
    return plan.launch.window_s + _LINGER_S


def _spec(job: Job, place: PodPlace, restart_policy: str | None, subdomain: str | None) -> Fields:
    plan, k8s = job.plan, job.plan.launch.k8s
    spec: Fields = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s(plan),
        "nodeSelector": placement.node_selector(plan),
        "securityContext": pod_security(plan),
    }
    if restart_policy is not None:
        spec["restartPolicy"] = restart_policy
    if subdomain is not None:
        spec["subdomain"] = subdomain
    if k8s.kind != "volcano":  # Volcano's job has this field
        spec |= placement.priority_class(plan)
    if k8s.host_network:
        # This policy keeps the names of the cluster's services resolvable with hostNetwork.
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    spec |= pod_options(plan)
    if tolerations := placement.tolerations(plan):
        spec["tolerations"] = tolerations
    spec["containers"] = [container(job, place)]
    spec["volumes"] = volumes(job)[0]
    return spec


def pod_options(plan: Plan) -> Fields:
    """Return optional fields of the pod, set only if the user asks for them."""
    k8s = plan.launch.k8s
    options: Fields = {}
    if k8s.service_account is not None:
        options["serviceAccountName"] = k8s.service_account
    if k8s.image_pull_secrets:
        options["imagePullSecrets"] = [{"name": name} for name in dict.fromkeys(k8s.image_pull_secrets)]
    return options


def container(job: Job, place: PodPlace) -> Fields:
    """Return the container that runs the agent."""
    plan = job.plan
    fields: Fields = {"name": place.container, "image": plan.launch.image, "command": command(job, place)}
    if plan.launch.k8s.image_pull_policy is not None:
        fields["imagePullPolicy"] = plan.launch.k8s.image_pull_policy
    if variables := environment(plan) + key_variable(job):
        fields["env"] = variables
    if plan.devices.nodes > 1:
        port: Fields = {"name": place.port, "containerPort": PORT, "protocol": "TCP"}
        fields["ports"] = [port | ({"hostPort": PORT} if plan.launch.k8s.host_network else {})]
    fields["resources"] = resources(plan)
    fields["securityContext"] = container_security(plan)
    fields["volumeMounts"] = volumes(job)[1]
    fields["terminationMessagePath"] = _TERMINATION_LOG
    fields["terminationMessagePolicy"] = "FallbackToLogsOnError"
    return fields


def pod_security(plan: Plan) -> Fields:
    """Return the settings that the pod security standard "restricted" requires of a pod, unless the user chose root."""
    user = plan.launch.k8s.user
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(plan: Plan) -> Fields:
    """Return the settings that "restricted" requires of a container; IPC_LOCK is added, as RDMA needs pinned memory.

    Beyond the standard, the root file system is read-only.
    """
    capabilities: Fields = {"drop": ["ALL"]}
    if plan.launch.k8s.rdma is not None:
        capabilities["add"] = ["IPC_LOCK"]
    read_only = {} if plan.launch.k8s.writable_root else {"readOnlyRootFilesystem": True}
    return {"allowPrivilegeEscalation": False, **read_only, "capabilities": capabilities}
