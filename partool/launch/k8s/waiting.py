"""Finds out from Kueue, Volcano or the cluster's events why a queued Kubernetes job waits."""

from __future__ import annotations

from partool.launch.k8s.client import Client, Document
from partool.launch.k8s.errors import ApiError
from partool.launch.k8s.resources import EVENTS, Resource
from partool.launch.k8s.status import progress

KUEUE_GROUP = "kueue.x-k8s.io"
QUEUE_LABEL = f"{KUEUE_GROUP}/queue-name"
_POD_GROUPS = Resource("scheduling.volcano.sh/v1beta1", "podgroups")
_NO_PODS = "there are no pods yet"
_LONGEST = 300


def why(client: Client, kind: str, job: Document, default: str) -> str:
    """Return why a job waits; ``default`` is the reason that the job and its pods give. Raises LaunchError."""
    suspended = progress(kind, job).phase == "suspended"
    if not suspended and default != _NO_PODS:
        return default
    try:
        reason = _kueue(client, job) if suspended else _volcano(client, job) if kind == "volcano" else ""
        reason = reason or _events(client, job["metadata"]["name"])
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        reason = ""
    return (reason or default)[:_LONGEST]


def refused_pods(client: Client, job: Document) -> str:
    """Return why the cluster does not create the pods that a job lacks; empty if no event says so. Raises LaunchError.

    A controller goes on trying, and says so in events about the job or about the Jobs made for it: a quota is used up,
    or an admission policy refuses the pod.
    """
    try:
        return _events(client, job["metadata"]["name"], "FailedCreate")[:_LONGEST]
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        return ""


def kueue_version(client: Client) -> str:
    """Return the version of Kueue's API that the cluster prefers; empty without Kueue."""
    try:
        answer: str = client.read(f"/apis/{KUEUE_GROUP}")["preferredVersion"]["groupVersion"]
    except ApiError as error:
        if error.status in (403, 404):
            return ""
        raise
    return answer


def _kueue(client: Client, job: Document) -> str:
    """Return the reason that the job's Kueue Workload gives (https://kueue.sigs.k8s.io/docs/concepts/workload/)."""
    queue = (job["metadata"].get("labels") or {}).get(QUEUE_LABEL, "")
    version = kueue_version(client)
    if not version or not queue:
        return "suspended; no controller handles it (no Kueue)" if queue else "suspended by hand"
    selector = f"{KUEUE_GROUP}/job-uid={job['metadata']['uid']}"
    workloads = client.select(Resource(version, "workloads"), labelSelector=selector)
    if not workloads:
        return f"suspended; Kueue has no Workload for it: is there a LocalQueue {queue}?"
    status = workloads[0].get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or []}
    if conditions.get("QuotaReserved", {}).get("status") == "True":
        checks = [check for check in status.get("admissionChecks") or [] if check.get("state") != "Ready"]
        texts = [f"{check.get('name')} is {check.get('state')}: {check.get('message', '')}" for check in checks]
        return f"Kueue, queue {queue}: quota is reserved; {'; '.join(texts) or 'not admitted yet'}"
    text = conditions.get("QuotaReserved", {}).get("message") or "waits for quota"
    evicted = conditions.get("Evicted", {})
    eviction = f" (put back: {evicted.get('reason')})" if evicted.get("status") == "True" else ""
    return f"Kueue, queue {queue}: {text}{eviction}"


def _volcano(client: Client, job: Document) -> str:
    name = f"{job['metadata']['name']}-{job['metadata']['uid']}"
    group = client.get(_POD_GROUPS, name) or {}
    for condition in (group.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "Unschedulable" and condition.get("status") == "True":
            return f"Volcano: {condition.get('message') or condition.get('reason')}"
    return ""


def _events(client: Client, name: str, reason: str = "") -> str:
    """Return the latest warning event about the job or about objects made for the job (quotas, pod security...).

    With ``reason``, only events that give this reason count.
    """
    warnings = [
        event
        for event in client.select(EVENTS, fieldSelector="type=Warning")
        if reason in ("", event.get("reason"))
        and f"{event['involvedObject'].get('name') or ''}-".startswith(f"{name}-")
    ]
    if not warnings:
        return ""
    latest = max(warnings, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return f"{latest.get('reason')}: {latest.get('message')}"
