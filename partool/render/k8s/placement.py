"""Constraints on the nodes where pods may run."""

from __future__ import annotations

from partool.catalog.lookup import table
from partool.plan.types import Plan
from partool.render.k8s.manifest import Fields
from partool.render.k8s.resources import DEVICES, device_resource

_ARCHITECTURE = "kubernetes.io/arch"


def architecture(plan: Plan) -> str:
    """Return Kubernetes's name of the nodes' architecture: the host's if the catalog knows the host, else amd64."""
    entry = table("accelerators").get(plan.devices.accelerator)
    return str(table("hosts")[entry["host"]]["architecture"]) if entry else "amd64"


def node_selector(plan: Plan) -> dict[str, str]:
    """Return the labels that a node must have to get a pod; the user's labels override partool's."""
    return {_ARCHITECTURE: architecture(plan), **plan.launch.k8s.node_selector}


def tolerations(plan: Plan) -> list[dict[str, str]]:
    """Return the tolerations for taints of nodes with devices and of arm64 nodes, and the user's tolerations."""
    items = []
    device = device_resource(plan)
    if plan.devices.slice and plan.launch.k8s.device_resource is None:
        device = DEVICES[plan.devices.backend]  # nodes are tainted alike, whether their devices are sliced or not
    if device is not None:
        items.append({"key": device, "operator": "Exists", "effect": "NoSchedule"})
    if node_selector(plan)[_ARCHITECTURE] == "arm64":  # GKE taints such nodes
        items.append({"key": _ARCHITECTURE, "operator": "Equal", "value": "arm64", "effect": "NoSchedule"})
    for each in plan.launch.k8s.tolerations:
        item = {"key": each.key, "operator": "Exists" if each.value is None else "Equal"}
        item |= {} if each.value is None else {"value": each.value}
        items.append(item | ({"effect": each.effect} if each.effect else {}))
    return items


def topology_annotations(plan: Plan) -> dict[str, str]:
    """Return the annotations of the pod template that make Kueue place all pods close to each other."""
    topology = plan.launch.k8s.topology
    if topology is None:
        return {}
    how = "required" if topology.required else "preferred"
    return {f"kueue.x-k8s.io/podset-{how}-topology": topology.level}


def priority_class(plan: Plan) -> Fields:
    """Return the pods' priority class; empty if the plan sets a queue, because Kueue then handles priority."""
    k8s = plan.launch.k8s
    return {} if k8s.priority is None or k8s.queue is not None else {"priorityClassName": k8s.priority}
