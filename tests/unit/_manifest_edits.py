"""Valid manifests of every kind, and edits that break them."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _k8s_case import k8s_job

from partool.launch.k8s.validate.manifest import Manifest
from partool.launch.k8s.validate.reading import load_documents, manifest_of
from partool.render.render import render

CRDS = Path(os.environ.get("PARTOOL_TEST_CRDS") or Path(__file__).parents[3] / "shared" / "crds")
"""Folder with CRDs of add-ons: third-party data beside the checkout, which may be absent."""
needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason=f"no CRDs in {CRDS} (PARTOOL_TEST_CRDS names another folder)")

OPEN = {"labels", "annotations", "nodeSelector", "limits", "requests", "data", "selector", "plugins"}
"""Mappings whose keys the user chooses."""
Step = str | int
Place = tuple[Step, ...]


class GONE:
    """Value of an edit that removes the field."""


@functools.cache
def rendered(kind: str, nodes: int = 2, machine: str = "nvidia") -> str:
    """Return a manifest rendered by partool, with no list empty that partool can fill."""
    fields: dict[str, Any] = {
        "queue": "team",
        "priority": "high",
        "namespace": "ml",
        "image_pull_secrets": ["registry"],
        "image_pull_policy": "IfNotPresent",
        "service_account": "trainer",
        "tolerations": [{"key": "team", "value": "a", "effect": "NoSchedule"}],
        "rdma": {"resource": "rdma/hca", "count": 2},
        "topology": {"level": "example.com/rack"},
        "deadline_s": 3600,
        "labels": {"team": "a"},
        "annotations": {"example.com/note": "b"},
    }
    job = k8s_job(
        kind,
        nodes,
        machine,
        restarts=2,
        env={"MODE": "fast"},
        secrets={"HF_TOKEN": {"secret": "hf", "key": "token"}},
        mounts=[{"source": "/data", "target": "/data"}, {"source": "pvc:cache", "target": "/cache"}],
        k8s=fields,
    )
    return render("k8s", job).text


@functools.cache
def _documents(kind: str, nodes: int, machine: str) -> list[dict[str, Any]]:
    return load_documents(rendered(kind, nodes, machine))


def documents(kind: str, nodes: int = 2, machine: str = "nvidia") -> list[dict[str, Any]]:
    """Return a valid manifest's documents, for the caller to break."""
    return copy.deepcopy(_documents(kind, nodes, machine))


def put(value: Any, path: Place, new: Any) -> None:
    """Set or remove a field; a list grows by one where the index is its length."""
    for step in path[:-1]:
        value = value[step]
    if new is GONE:
        del value[path[-1]]
    elif isinstance(value, list) and path[-1] == len(value):
        value.append(new)
    else:
        value[path[-1]] = new


def step(text: str) -> Place:
    """Return ``a.0.b`` as a path; ``|`` stands for a dot within a key."""
    return tuple(int(each) if each.isdigit() else each.replace("|", ".") for each in text.split(".") if each)


POD = {
    "job": "spec.template",
    "jobset": "spec.replicatedJobs.0.template.spec.template",
    "pytorchjob": "spec.pytorchReplicaSpecs.Worker.template",
    "volcano": "spec.tasks.0.template",
    "trainjob": "spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0.template.spec.template",
}
JOB = {"job": "spec", "jobset": "spec.replicatedJobs.0.template.spec"}


def edited(kind: str, *edits: tuple[str, Any], nodes: int = 2) -> Manifest:
    """Return a manifest with edits ``(place, value)`` of its last document.

    A place begins with ``pod:``, ``main:`` (its only container) or ``job:`` (the Job's spec), or with ``map:`` or
    ``service:`` for the other documents.
    """
    found = documents(kind, nodes)
    for place, value in edits:
        where, colon, rest = place.partition(":")
        base = {"pod": POD[kind], "main": POD[kind] + ".spec.containers.0", "job": JOB.get(kind, "")}.get(where, "")
        names = {"map": 0, "service": 1}
        put(found[names.get(where, -1)], step(f"{base}.{rest if colon else place}"), copy.deepcopy(value))
    return manifest_of(found)


class Mutation(NamedTuple):
    """One fault to put into a manifest."""

    name: str
    apply: Callable[[list[dict[str, Any]]], None]


def _walk(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _walk(item, (*path, key))


ENUMS = {
    "restartPolicy", "completionMode", "podReplacementPolicy", "action", "operator", "status", "effect", "medium",
    "imagePullPolicy", "terminationMessagePolicy", "fsGroupChangePolicy", "protocol", "cleanPodPolicy",
    "restartStrategy", "event", "clusterIP", "type",
}  # fmt: skip
REQUIRED = {
    "name", "image", "mountPath", "containers", "containerPort", "port", "action", "operator", "values", "type", "key",
    "claimName", "path", "template", "apiVersion", "kind", "metadata", "runtimeRef", "pytorchReplicaSpecs", "manager",
    "selector", "clusterIP", "publishNotReadyAddresses", "subdomain", "configMap",
}  # fmt: skip
QUANTITIES = {"limits", "requests"}
FREE_TEXT = {"command", "args", "value", "onJobFailureMessagePatterns", "apiGroup", "annotations", "data"}
"""Fields that take any text."""


def mutations(kind: str) -> Iterator[Mutation]:
    """Yield every mutation of a kind's manifest: one place, one fault."""
    for index, document in enumerate(documents(kind)):
        for path, value in _walk(document):
            for fault, new, at in _faults(path, value, kind):
                place = ".".join(map(str, at))
                yield Mutation(
                    f"{document['kind']} {place}: {fault}",
                    lambda found, index=index, at=at, new=new: put(found[index], at, copy.deepcopy(new)),
                )


def _faults(path: Place, value: Any, kind: str) -> Iterator[tuple[str, Any, Place]]:
    key = next((each for each in reversed(path) if isinstance(each, str)), "")
    parent = path[-2] if len(path) > 1 else ""
    yield from _faults_of_keys(path, value, key, parent, kind)
    if isinstance(value, dict):
        if not OPEN & set(path):
            yield "unknown key", 1, (*path, "surprise")
        if path:
            yield "wrong type", "text", path
    elif isinstance(value, list):
        if parent != "plugins":
            yield "wrong type", "text", path
        if value and isinstance(value[0], dict) and {"name", "mountPath", "manager"} & value[0].keys():
            yield "duplicate", value[0], (*path, len(value))
    elif isinstance(value, bool):
        yield "wrong type", "perhaps", path
    elif isinstance(value, int):
        if key != "targetPort":  # may be a port's name
            yield "wrong type", "many", path
        yield "negative", -5, path
    elif isinstance(value, str):
        yield "wrong type", ["a", "list"], path
        if key in ENUMS and not FREE_TEXT & set(path) and not (key == "type" and "onPodConditions" in path):
            yield "bad enum", "Sometimes", path
        if parent in QUANTITIES or key == "sizeLimit":
            yield "bad quantity", "12 Gigs", path
            yield "negative quantity", "-1", path


def _faults_of_keys(path: Place, value: Any, key: str, parent: Step, kind: str) -> Iterator[tuple[str, Any, Place]]:
    if path and path[-1] in REQUIRED and not OPEN & set(path[:-1]) and not _optional(path, kind):
        yield "missing", GONE, path
    if key in ("labels", "annotations", "nodeSelector") and isinstance(value, dict):
        yield "illegal key", "x", (*path, "bad key!")
    if parent in ("labels", "nodeSelector"):
        yield "illegal value", "bad value!", path
    if path and path[-1] in ("name", "namespace", "claimName", "subdomain", "serviceAccountName", "key"):
        yield "illegal name", "Bad Name!", path


def _optional(path: Place, kind: str) -> bool:
    """Return True for fields that only look like the required ones of the same name."""
    return (
        (path[-1] == "name" and "ports" in path)
        or (path[-1] == "metadata" and len(path) > 1)
        or (path[-1] == "type" and "hostPath" in path)
        or (path[-1] == "kind" and len(path) > 1)
        or (path[-1] in ("key", "operator") and "tolerations" in path)
        or (path[-1] == "publishNotReadyAddresses" and kind == "jobset")
        or (path[-1] in ("image", "template", "containers") and kind == "trainjob")
    )
