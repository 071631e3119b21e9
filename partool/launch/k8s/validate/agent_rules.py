"""Rules that compare a run's manifest with its plan: nodes, devices, grace period, rendezvous of the agents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from partool.launch.k8s.validate.findings import FieldFault, at
from partool.launch.k8s.validate.forms import parse_quantity
from partool.launch.k8s.validate.manifest import DocumentPart, Manifest, Pods, dig
from partool.plan.run import PLAN_FILE
from partool.render.k8s.objects import HASH_ANNOTATION
from partool.render.k8s.resources import DEVICES, resource_name
from partool.spec.launch import SHORTEST_WINDOW_S

_AGENT = "partool_runtime.agent"
_SET: dict[str, set[str | None]] = {
    "JobSet": {"JOB_COMPLETION_INDEX"},
    "TrainJob": {"JOB_COMPLETION_INDEX"},
    "PyTorchJob": {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"},
    "Job": {"JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "VK_TASK_INDEX"},
}
"""Kind of job → names of the variables that the kind's controller adds to every container."""


def grace(manifest: Manifest) -> Iterator[FieldFault]:
    """Find pods that are killed before the agent's shutdown timeout is over (default grace period: 30 seconds)."""
    timeout_s = dig(plan_of(manifest), "launch", "shutdown_timeout_s")
    timeout_s = SHORTEST_WINDOW_S if timeout_s == "auto" else timeout_s
    if not isinstance(timeout_s, int):
        return
    for pods in manifest.pods:
        given_s = pods.spec.number("terminationGracePeriodSeconds")
        if (30 if given_s is None else given_s) <= timeout_s:
            text = f"{'30, the default,' if given_s is None else given_s} must be above the agent's {timeout_s} seconds"
            yield at(pods.spec, "terminationGracePeriodSeconds", text=f"{text} for a checkpoint")


def nodes(manifest: Manifest) -> Iterator[FieldFault]:
    """Find manifests whose number of pods, or whose agents' ``--nodes``, differs from the plan's number of nodes."""
    wanted = dig(plan_of(manifest), "devices", "nodes")
    counts = [pods.count for pods in manifest.pods if not pods.is_patch and pods.count is not None]
    trainers = [d.number("spec", "trainer", "numNodes") or 1 for d in manifest.of("TrainJob", "trainer.kubeflow.org")]
    if isinstance(wanted, int) and (counts or trainers) and sum(counts) + sum(trainers) != wanted:
        text = f"{sum(counts) + sum(trainers)} pods for a plan of {wanted} nodes"
        owner = manifest.pods[0].maker if counts else manifest.of("TrainJob", "trainer.kubeflow.org")[0]
        yield at(owner, text=text)
    for holder in _agents(manifest):
        option = _option(holder, "--nodes")
        if isinstance(wanted, int) and (option or "1") != str(wanted):
            yield at(holder, "command", text=f"--nodes {option or '1'} for a plan of {wanted} nodes")
        if (option is None) != (_option(holder, "--rendezvous") is None):
            yield at(holder, "command", text="--nodes and --rendezvous belong together")


def devices(manifest: Manifest) -> Iterator[FieldFault]:
    """Find containers whose number of devices differs from the plan's ranks per node."""
    plan = plan_of(manifest)
    per_node, backend = dig(plan, "devices", "per_node"), dig(plan, "devices", "backend")
    if not isinstance(per_node, int) or backend not in DEVICES:
        return
    set_resource, profile = dig(plan, "launch", "k8s", "device_resource"), dig(plan, "devices", "slice")
    resource = set_resource or resource_name(backend, profile if isinstance(profile, str) else "")
    for holder in _agents(manifest):
        field = "resourcesPerNode" if holder.path[-1:] == ("trainer",) else "resources"
        given = parse_quantity(holder.get(field, "limits", resource))
        if given != per_node:
            text = f"{'none' if given is None else given} for {per_node} ranks on a node"
            yield at(holder, field, "limits", resource, text=text)


def hashes(manifest: Manifest) -> Iterator[FieldFault]:
    """Find plan hashes, on objects or on the agent's command line, that differ from each other."""
    object_hashes = {
        value: document
        for document in manifest.documents
        if isinstance(value := document.get("metadata", "annotations", HASH_ANNOTATION), str)
    }
    for holder in _agents(manifest):
        agent_hash = _option(holder, "--plan-hash")
        if object_hashes and agent_hash is not None and agent_hash not in object_hashes:
            yield at(holder, "command", text=f"--plan-hash {agent_hash[:12]}... is not the hash on the objects")
    if len(object_hashes) > 1:
        yield at(
            list(object_hashes.values())[-1],
            "metadata",
            "annotations",
            HASH_ANNOTATION,
            text="the objects have different hashes",
        )


def meeting_place(manifest: Manifest) -> Iterator[FieldFault]:
    """Find agents that would wait for a pod that does not exist."""
    for holder, document, pods in _agents_of(manifest):
        rendezvous, first = _option(holder, "--rendezvous"), _first_pod(document, pods)
        host = (rendezvous or "").rpartition(":")[0]
        if rendezvous is not None and host != first and not host.startswith(f"{first}."):
            yield at(holder, "command", text=f"--rendezvous {rendezvous}: pod 0 is {first}")


def variables(manifest: Manifest) -> Iterator[FieldFault]:
    """Find commands that refer to a missing variable as ``$(NAME)``: Kubernetes would not expand this reference."""
    for holder, document, _ in _agents_of(manifest):
        names = {variable.text("name") for variable in holder.parts("env")} | _SET[str(document.get("kind"))]
        for word in _command(holder):
            for name in re.findall(r"(?<!\$)(?:\$\$)*\$\(([A-Za-z_]\w*)\)", str(word)):
                if name not in names:
                    yield at(holder, "command", text=f"$({name}) names a variable that the container does not have")


def _first_pod(document: DocumentPart, pods: Pods | None) -> str:
    """Return the DNS name that the controller of the document's kind gives pod 0."""
    name = document.text("metadata", "name")
    if pods is None:
        return f"{name}-node-0-0.{name}"
    if pods.kind == "Job":
        return f"{name}-0.{pods.spec.text('subdomain')}"
    if pods.kind == "JobSet":
        first = document.text("spec", "replicatedJobs", 0, "name")
        return f"{name}-{first}-0-0.{document.text('spec', 'network', 'subdomain') or name}"
    first = document.text("spec", "tasks", 0, "name")
    return f"{name}-master-0" if pods.kind == "PyTorchJob" else f"{name}-{first}-0.{name}"


def plan_of(manifest: Manifest) -> Any:
    """Return the plan in a ConfigMap of the manifest, as data; None if there is no readable plan."""
    for document in manifest.of("ConfigMap"):
        text = document.get("data", PLAN_FILE)
        if isinstance(text, str):
            try:
                return json.loads(text)
            except ValueError:
                return None
    return None


def plans(manifest: Manifest) -> Iterator[FieldFault]:
    """Find plans that are not JSON."""
    for document in manifest.of("ConfigMap"):
        text = document.get("data", PLAN_FILE)
        if isinstance(text, str) and not isinstance(plan_of(Manifest((document,))), dict):
            yield at(document, "data", PLAN_FILE, text="is no JSON object")


def _agents(manifest: Manifest) -> list[DocumentPart]:
    """Return those parts of the documents that hold the agent's command line."""
    return [holder for holder, _, _ in _agents_of(manifest)]


def _agents_of(manifest: Manifest) -> list[tuple[DocumentPart, DocumentPart, Pods | None]]:
    """Return (container or trainer that runs the agent, its document, its pods) triples; a trainer has None as pods."""
    documents = {document.owner: document for document in manifest.documents if document.get("kind") != "ConfigMap"}
    candidates: list[tuple[DocumentPart, DocumentPart, Pods | None]] = [
        (container, documents[container.owner], pods) for pods in manifest.pods for container in pods.containers
    ]
    trainers = manifest.of("TrainJob", "trainer.kubeflow.org")
    candidates += [(document.part("spec", "trainer"), document, None) for document in trainers]
    return [each for each in candidates if _AGENT in _command(each[0])]


def _command(holder: DocumentPart) -> list[Any]:
    words = []
    for field in ("command", "args"):
        given = holder.get(field)
        words += given if isinstance(given, list) else []
    return words


def _option(holder: DocumentPart, name: str) -> str | None:
    words = _command(holder)
    after = words[words.index(name) + 1 :] if name in words else []
    return str(after[0]) if after else None
