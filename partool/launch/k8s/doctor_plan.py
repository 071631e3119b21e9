"""Checks whether a cluster has the nodes, queues, claims and secrets that a plan's job refers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from partool.launch.k8s import doctor_limits
from partool.launch.k8s.client import Client, Document
from partool.launch.k8s.errors import ApiError
from partool.launch.k8s.resources import SECRETS, Resource
from partool.launch.k8s.waiting import kueue_version
from partool.launch.target import Check
from partool.plan.types import Plan
from partool.render.k8s.placement import architecture, node_selector, tolerations
from partool.render.k8s.resources import resources
from partool.spec.targets.k8s.rules import quantity

_NODES = Resource("v1", "nodes", namespaced=False)
_CLAIMS = Resource("v1", "persistentvolumeclaims")
_ACCOUNTS = Resource("v1", "serviceaccounts")
_PRIORITIES = Resource("scheduling.k8s.io/v1", "priorityclasses", namespaced=False)
_VOLCANO_QUEUES = Resource("scheduling.volcano.sh/v1beta1", "queues", namespaced=False)
_RUNTIMES = Resource("trainer.kubeflow.org/v1alpha1", "clustertrainingruntimes", namespaced=False)


def checks(client: Client, plan: Plan) -> Iterator[Check]:
    """Yield checks of the objects that a plan's job refers to; raises LaunchError."""
    yield from _nodes(client, plan)
    for label, resource, name in _references(client, plan):
        yield _existence(client, label, resource, name)
    yield from _claims(client, plan)
    yield from doctor_limits.checks(client, plan)
    yield _image(plan)


def _nodes(client: Client, plan: Plan) -> Iterator[Check]:
    try:
        nodes = client.select(_NODES)
    except ApiError as error:
        if error.status != 403:
            raise
        yield Check("nodes", "skipped", "they may not be listed; an administrator can: kubectl get nodes")
        return
    asked_for = resources(plan)
    wanted = {**asked_for["requests"], **asked_for["limits"]}
    select, tolerated = node_selector(plan), tolerations(plan)
    open_nodes = [node for node in nodes if not node.get("spec", {}).get("unschedulable")]
    labelled = [node for node in open_nodes if select.items() <= (node["metadata"].get("labels") or {}).items()]
    large = [node for node in labelled if _holds(node, wanted)]
    fit = [node for node in large if all(_bears(tolerated, taint) for taint in node["spec"].get("taints") or [])]
    needed = plan.devices.nodes
    asked = ", ".join(f"{name} {amount}" for name, amount in wanted.items())
    labels = ", ".join(f"{name}={value}" for name, value in select.items())
    text = f"{len(fit)} of {len(nodes)} nodes fit a pod ({labels}; {asked}), the plan has {needed}"
    if len(fit) >= needed:
        yield Check("nodes", "ok", f"{text}; resources that other pods hold are not subtracted")
        return
    lost = f"{len(labelled)} have the labels, {len(large)} of them the resources, {len(fit)} no taint in the way"
    help = "launch.k8s.node_selector, tolerations, cpu and memory; fine if the cluster adds nodes on demand"
    yield Check("nodes", "warning", f"{text}; {lost}; {_devices(open_nodes)}", help)


def _holds(node: Document, wanted: dict[str, str]) -> bool:
    has = node.get("status", {}).get("allocatable") or {}
    return all(_amount(has.get(name, "0")) >= _amount(amount) for name, amount in wanted.items())


def _amount(text: str) -> float:
    try:
        return quantity(text)
    except ValueError:
        return 0.0


def _bears(tolerated: list[dict[str, str]], taint: Document) -> bool:
    """Return whether a pod with the tolerations ``tolerated`` may run on a node with ``taint``.

    See https://kubernetes.io/docs/concepts/scheduling-eviction/.
    """
    if taint.get("effect") == "PreferNoSchedule":
        return True
    return any(
        each.get("key") == taint["key"]
        and each.get("effect") in (None, taint.get("effect"))
        and (each["operator"] == "Exists" or each.get("value", "") == taint.get("value", ""))
        for each in tolerated
    )


def _devices(nodes: list[Document]) -> str:
    """Return a text that states how many devices the nodes have, by resource name and architecture."""
    totals: dict[tuple[str, str], int] = {}
    for node in nodes:
        arch = node.get("status", {}).get("nodeInfo", {}).get("architecture", "?")
        for name, amount in (node.get("status", {}).get("allocatable") or {}).items():
            if "/" in name and not name.startswith("hugepages"):
                totals[name, arch] = totals.get((name, arch), 0) + int(_amount(amount))
    parts = [f"{count} {name} on {arch}" for (name, arch), count in sorted(totals.items())]
    return f"the cluster has {', '.join(parts)}" if parts else "no node has devices"


def _references(client: Client, plan: Plan) -> Iterator[tuple[str, Resource, str]]:
    """Yield (label of the check, kind of the object, name of the object) for each object that the job refers to."""
    k8s, kueue = plan.launch.k8s, kueue_version(client)
    with_kueue = k8s.queue is not None and k8s.kind != "volcano"
    if k8s.queue is not None:
        yield "queue", _VOLCANO_QUEUES if k8s.kind == "volcano" else _local_queues(kueue), k8s.queue
    if k8s.priority is not None:
        by_kueue = Resource(kueue or "kueue.x-k8s.io/v1beta1", "workloadpriorityclasses", namespaced=False)
        yield "priority", by_kueue if with_kueue else _PRIORITIES, k8s.priority
    if k8s.kind == "trainjob":
        yield "runtime", _RUNTIMES, k8s.runtime
    if k8s.service_account is not None:
        yield "service account", _ACCOUNTS, k8s.service_account
    named = [secret.secret for secret in plan.launch.secrets.values() if secret.secret is not None]
    for name in sorted({*named, *k8s.image_pull_secrets}):
        yield "secret", SECRETS, name


def _local_queues(version: str) -> Resource:
    return Resource(version or "kueue.x-k8s.io/v1beta1", "localqueues")


def _existence(client: Client, label: str, resource: Resource, name: str) -> Check:
    try:
        exists = client.exists(resource, name)
    except ApiError as error:
        if error.status == 403:
            return Check(label, "skipped", f"{name}: whether it is there may not be asked")
        if error.unknown_kind:
            return Check(label, "failed", f"{name}: the cluster does not know {resource.full_name}", "install it")
        raise
    if exists:
        return Check(label, "ok", f"{resource.full_name} {name}")
    where = f" in namespace {client.namespace}" if resource.namespaced else ""
    help = f"kubectl get {resource.full_name}" + (f" -n {client.namespace}" if resource.namespaced else "")
    return Check(label, "failed", f"there is no {resource.full_name} {name}{where}", help)


def _claims(client: Client, plan: Plan) -> Iterator[Check]:
    sources = [plan.launch.k8s.storage or "", *(mount.source for mount in plan.launch.mounts)]
    for name in sorted({source.removeprefix("pvc:") for source in sources if source.startswith("pvc:")}):
        try:
            claim = client.get(_CLAIMS, name)
        except ApiError as error:
            if error.status != 403:
                raise
            yield Check("claim", "skipped", f"{name}: whether it is there may not be asked")
            continue
        yield _claim(claim, name, client.namespace, plan.devices.nodes)


def _claim(claim: dict[str, Any] | None, name: str, namespace: str, nodes: int) -> Check:
    if claim is None:
        text = f"there is no persistentvolumeclaim {name} in namespace {namespace}"
        return Check("claim", "failed", text, f"kubectl get pvc -n {namespace}")
    modes, phase = claim["spec"].get("accessModes") or [], claim.get("status", {}).get("phase", "Pending")
    text = f"{name} is {phase}, {', '.join(modes)}"
    if nodes > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
        return Check("claim", "failed", f"{text}: {nodes} nodes cannot mount it at once", "use one with ReadWriteMany")
    if phase == "Lost":
        return Check("claim", "failed", text, "its volume is gone")
    return Check("claim", "ok", text)


def _image(plan: Plan) -> Check:
    image, arch = plan.launch.image or "", architecture(plan)
    command = f"docker buildx imagetools inspect {image}"
    text = f"only the registry knows whether {image} is built for linux/{arch}: {command}"
    return Check("image", "skipped", text)
