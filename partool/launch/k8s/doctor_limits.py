"""Checks whether a namespace's quotas, limit ranges and pod security level let a plan's pods start at all.

All three are enforced when a pod is created. The pods of a job are created by its controller, so that the job itself is
accepted, and waits for ever for pods that are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from partool.launch.k8s.client import Client, Document
from partool.launch.k8s.errors import ApiError
from partool.launch.k8s.resources import Resource
from partool.launch.target import Check
from partool.plan.types import Plan
from partool.render.k8s.resources import resources
from partool.spec.targets.k8s.rules import quantity

_NAMESPACES = Resource("v1", "namespaces", namespaced=False)
_QUOTAS = Resource("v1", "resourcequotas")
_RANGES = Resource("v1", "limitranges")
_LEVEL = "pod-security.kubernetes.io/enforce"
"""Label of a namespace (https://kubernetes.io/docs/concepts/security/pod-security-admission/)."""
_EXPONENTS = {"E": 1e18, "Ei": 2.0**60, "n": 1e-9, "u": 1e-6}
"""Suffixes of quantities that a server may send, beside those that specs use."""
_FIELDS = {"cpu": "launch.k8s.cpu", "memory": "launch.k8s.memory", "ephemeral-storage": "launch.k8s.ephemeral_storage",
           "pods": "hardware.nodes"}  # fmt: skip
"""Resource → field of the spec that says how much of it a pod asks for; devices follow from ``hardware.per_node``."""


def checks(client: Client, plan: Plan) -> Iterator[Check]:
    """Yield checks of quotas, limit ranges and the pod security level; raises LaunchError."""
    yield from _readable("quota", "resource quotas", lambda: _quotas(client, plan))
    yield from _readable("limit range", "limit ranges", lambda: _ranges(client, plan))
    yield from _readable("pod security", "labels of the namespace", lambda: [_security(client, plan)])


def _readable(name: str, what: str, look: Callable[[], Any]) -> Iterator[Check]:
    """Yield checks; if the user may not read what they need, yield a skipped check instead."""
    try:
        yield from look()
    except ApiError as error:
        if error.status != 403:
            raise
        yield Check(name, "skipped", f"the {what} may not be read; an administrator can")


def _quotas(client: Client, plan: Plan) -> Iterator[Check]:
    quotas = [quota for quota in client.select(_QUOTAS) if _covers(quota.get("spec") or {}, plan)]
    for quota in quotas:
        yield _quota(quota, plan, client.namespace)
    if not quotas:
        yield Check("quota", "ok", f"no resource quota covers the pods in namespace {client.namespace}")


def _covers(spec: Document, plan: Plan) -> bool:
    """Return whether a quota counts the pods of a plan (https://kubernetes.io/docs/concepts/policy/resource-quotas/).

    The pods request resources, and they have no deadline of their own.
    """
    scopes = [{"scopeName": name, "operator": "Exists"} for name in spec.get("scopes") or []]
    scopes += (spec.get("scopeSelector") or {}).get("matchExpressions") or []
    return all(_matches(scope, plan) for scope in scopes)


def _matches(scope: Document, plan: Plan) -> bool:
    name, operator, values = scope["scopeName"], scope.get("operator", "Exists"), scope.get("values") or []
    if name != "PriorityClass":
        return bool(name in ("NotBestEffort", "NotTerminating"))
    k8s = plan.launch.k8s
    priority = None if k8s.queue is not None and k8s.kind != "volcano" else k8s.priority
    if operator in ("Exists", "DoesNotExist"):
        return bool((priority is not None) == (operator == "Exists"))
    return bool((priority in values) == (operator == "In"))


def asked(plan: Plan) -> dict[str, float]:
    """Return what the pods of a plan ask for together, by the names that quotas use."""
    pods, pod = plan.devices.nodes, resources(plan)
    amounts = {"pods": float(pods), "count/pods": float(pods)}
    for kind in ("requests", "limits"):
        amounts |= {f"{kind}.{name}": pods * quantity(amount) for name, amount in pod[kind].items()}
    extended = {name: amount for name, amount in pod["limits"].items() if "/" in name}
    amounts |= {f"requests.{name}": pods * quantity(amount) for name, amount in extended.items()}
    short = ("cpu", "memory", "ephemeral-storage")
    return amounts | {name: amounts[f"requests.{name}"] for name in short}


def _quota(quota: Document, plan: Plan, namespace: str) -> Check:
    """Compare a quota with what a plan asks for: never enough is a failure, not enough at present is a warning."""
    hard = (quota.get("status") or {}).get("hard") or (quota.get("spec") or {}).get("hard") or {}
    used = (quota.get("status") or {}).get("used") or {}
    never, later, fields = [], [], []
    for name, amount in asked(plan).items():
        limit = _amount(hard.get(name))
        if limit is None or amount <= limit - (_amount(used.get(name)) or 0.0):
            continue
        each = f"{name}: the job's {plan.devices.nodes} pods ask for {_text(amount)}, the limit is {hard[name]}"
        if amount > limit:
            never.append(each)
            fields.append(_FIELDS.get(name.rpartition(".")[2], "hardware.nodes and per_node"))
        else:
            later.append(f"{each}, of which {used[name]} are used")
    title = f"quota {quota['metadata']['name']}"
    show = f"kubectl describe resourcequota {quota['metadata']['name']} -n {namespace}"
    if never:
        help = f"lower {', '.join(dict.fromkeys(fields))}, or ask for a larger quota ({show})"
        return Check(title, "failed", "; ".join([*never, *later]), help)
    if later:
        return Check(title, "warning", "; ".join(later), f"the pods wait until others end: {show}")
    return Check(title, "ok", f"has room for the job's {plan.devices.nodes} pods")


def _ranges(client: Client, plan: Plan) -> Iterator[Check]:
    pod = resources(plan)
    problems, fields = [], []
    for document in client.select(_RANGES):
        for item in (document.get("spec") or {}).get("limits") or []:
            if item.get("type") not in ("Container", "Pod"):
                continue
            for name, text in (item.get("max") or {}).items():
                most, given = _amount(text), _amount(pod["limits"].get(name))
                if most is not None and given is not None and given > most:
                    problems.append(_beyond(document, item, name, pod["limits"][name], f"at most {text}"))
                    fields.append(_FIELDS.get(name, "hardware.per_node"))
            for name, text in (item.get("min") or {}).items():
                requested = (pod["limits"] | pod["requests"]).get(name, "")
                least, given = _amount(text), _amount(requested)
                if least is not None and given is not None and given < least:
                    problems.append(_beyond(document, item, name, requested, f"at least {text}"))
                    fields.append(_FIELDS.get(name, "hardware.per_node"))
    if problems:
        help = f"set {', '.join(dict.fromkeys(fields))}; kubectl describe limitrange -n {client.namespace}"
        yield Check("limit range", "failed", "; ".join(problems), help)
    else:
        yield Check("limit range", "ok", f"nothing in namespace {client.namespace} is against the pods' size")


def _beyond(document: Document, item: Document, name: str, requested: str, bound: str) -> str:
    where = f"{document['metadata']['name']} allows a {item['type'].lower()}"
    return f"{name} is {requested}, and {where} {bound}"


def _security(client: Client, plan: Plan) -> Check:
    document = client.get(_NAMESPACES, client.namespace) or {"metadata": {}}
    level = (document["metadata"].get("labels") or {}).get(_LEVEL, "")
    if level not in ("baseline", "restricted"):
        said = f"namespace {client.namespace} enforces {level}" if level else "the namespace's labels enforce no level"
        return Check("pod security", "ok", said)
    problems = list(_violations(plan, level))
    if not problems:
        return Check("pod security", "ok", f"the pods meet {level}, which namespace {client.namespace} enforces")
    said = "; ".join(f"{what} ({field})" for what, field, _ in problems)
    text = f"namespace {client.namespace} enforces {level}, which refuses pods with {said}"
    help = f"{'; '.join(change for _, _, change in problems)}; or use a namespace whose label {_LEVEL} is privileged"
    return Check("pod security", "failed", text, help)


def _violations(plan: Plan, level: str) -> Iterator[tuple[str, str, str]]:
    """Yield (what the level forbids, field of the spec, what to change) for each violation.

    Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/.
    """
    k8s = plan.launch.k8s
    if k8s.host_network:
        yield "the node's network", "launch.k8s.host_network", "drop host_network"
    folders = [mount.source for mount in plan.launch.mounts if not mount.source.startswith("pvc:")]
    if folders:
        yield f"folders of the node: {', '.join(folders)}", "launch.mounts", "mount claims (pvc:NAME)"
    if k8s.rdma is not None:
        yield "the capability IPC_LOCK", "launch.k8s.rdma", "drop rdma"
    if level == "restricted" and k8s.user == 0:
        yield "processes of root", "launch.k8s.user", "use user: 1000, say"


def _amount(text: str | None) -> float | None:
    """Return a quantity of the server's as a number; None if there is none or its form is not known."""
    if text is None:
        return None
    try:
        return quantity(text)
    except ValueError:
        pass
    number, suffix = text.rstrip("".join(_EXPONENTS)), text[len(text.rstrip("".join(_EXPONENTS))) :]
    try:
        return float(number) * _EXPONENTS[suffix] if suffix else float(text)
    except (ValueError, KeyError):
        return None


def _text(amount: float) -> str:
    """Return an amount as Kubernetes writes it, with a binary suffix where it is a multiple of one."""
    for suffix, unit in (("Gi", 2.0**30), ("Mi", 2.0**20)):
        if amount >= unit and amount % unit == 0:
            return f"{amount / unit:.0f}{suffix}"
    return f"{amount:g}"
