"""A small Kubernetes API server: enough for kubectl and for partool, with the failures of a real one on demand.

It stores objects, checks them strictly, deletes objects whose owners are deleted, and serves watches and logs. There
are no controllers: tests set the status of a job. Answers follow
https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import k8s_schemas
import yaml

Document = dict[str, Any]
Key = tuple[str, str, str, str]
"""Group and version, plural, namespace, name."""

CORE = {
    "v1": {
        "configmaps": "ConfigMap",
        "events": "Event",
        "limitranges": "LimitRange",
        "namespaces": "Namespace",
        "nodes": "Node",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "resourcequotas": "ResourceQuota",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
}
KUEUE = {"kueue.x-k8s.io/v1beta1": {"workloads": "Workload", "localqueues": "LocalQueue"}}
WITHOUT_NAMESPACE = {"namespaces", "nodes", "customresourcedefinitions", "clustertrainingruntimes"}


@dataclass
class Trouble:
    """A failure to inject into the next requests that match."""

    verb: str
    path: str
    """Regular expression, searched in the path with its query."""
    act: str
    """A status code (``503``), ``drop`` (before the request acts), ``lost`` (after), ``cut`` (mid-answer), ``slow``."""
    times: int = 1
    amount: float = 1.0
    """Seconds for ``slow``, lines for ``cut``."""
    status: Document = field(default_factory=dict)


@dataclass
class Log:
    """Output of a container."""

    lines: list[tuple[str, bytes]] = field(default_factory=list)
    """Lines with their times, as RFC 3339 with nanoseconds."""
    ended: bool = False


class Cluster:
    """Objects of the cluster, and the settings that a test can change."""

    def __init__(self, *, custom: bool = True, kueue: bool = False) -> None:
        self.changed = threading.Condition()
        self.version = "1.36"
        self.kinds: dict[str, dict[str, str]] = {gv: dict(kinds) for gv, kinds in CORE.items()}
        self.schemas: dict[tuple[str, str], Document] = {}
        self.objects: dict[Key, Document] = {}
        self.events: list[tuple[int, str, Key, Document]] = []
        self.resource_version = 100
        self.oldest = 0
        """Oldest version that a watch may start from; earlier ones are answered 410."""
        self.requests: list[tuple[str, str, Document | None]] = []
        self.troubles: list[Trouble] = []
        self.forbidden: set[tuple[str, str]] = set()
        """Forbidden pairs (verb, resource) in RBAC's notation, e.g. ``pods/log``."""
        self.token = ""
        """Bearer token that requests must carry; empty: any."""
        self.logs: dict[tuple[str, str, bool], Log] = {}
        """Logs by pod, container, and whether they are the previous container's."""
        self.lingering = False
        """Whether deleted jobs stay until :meth:`finish`, as they do while their pods stop."""
        self.page = 1 << 30
        """Largest number of objects in one page of a list, regardless of the client's limit."""
        self.stopping = False
        self.kinds |= KUEUE if kueue else {}
        for each in k8s_schemas.custom_types() if custom else ():
            self.kinds.setdefault(f"{each.group}/{each.version}", {})[each.plural] = each.kind
            self.schemas[f"{each.group}/{each.version}", each.kind] = each.schema
        self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}})

    def put(self, document: Document) -> Document:
        """Store an object without any check."""
        plural = self.plural(document["apiVersion"], document["kind"])
        meta = document.setdefault("metadata", {})
        if plural not in WITHOUT_NAMESPACE:
            meta.setdefault("namespace", "default")
        return self.store((document["apiVersion"], plural, meta.get("namespace", ""), meta["name"]), document)

    def plural(self, group_version: str, kind: str) -> str:
        """Return the plural of a kind."""
        return next(plural for plural, name in self.kinds[group_version].items() if name == kind)

    def find(self, plural: str, name: str) -> Document:
        """Return an object in any namespace; raises KeyError."""
        for key, document in self.objects.items():
            if key[1] == plural and key[3] == name:
                return document
        raise KeyError((plural, name))

    def names(self, plural: str) -> list[str]:
        """Return the names of all objects of a kind."""
        return [key[3] for key in self.objects if key[1] == plural]

    def set_status(self, plural: str, name: str, **status: Any) -> None:
        """Replace parts of an object's status."""
        with self.changed:
            key = next(key for key in self.objects if key[1] == plural and key[3] == name)
            document = clone(self.objects[key])
            document.setdefault("status", {}).update(status)
            self.store(key, document)

    def store(self, key: Key, document: Document, manager: str = "test") -> Document:
        """Store an object and notify the watches."""
        with self.changed:
            kind = "MODIFIED" if key in self.objects else "ADDED"
            self.resource_version += 1
            meta = document["metadata"]
            meta.setdefault("uid", str(uuid.uuid4()))
            meta.setdefault("creationTimestamp", now())
            meta["resourceVersion"] = str(self.resource_version)
            by = {"manager": manager, "operation": "Update", "apiVersion": key[0], "fieldsType": "FieldsV1"}
            meta.setdefault("managedFields", [{**by, "fieldsV1": {"f:spec": {}}, "time": now()}])
            self.objects[key] = document
            self.events.append((self.resource_version, kind, key, clone(document)))
            self.changed.notify_all()
            return document

    def remove(self, key: Key, *, at_once: bool = False) -> None:
        """Delete an object and its dependents; a lingering job is only marked as being deleted."""
        with self.changed:
            document = clone(self.objects[key])
            if self.lingering and not at_once and "job" in key[1]:
                document["metadata"].setdefault("deletionTimestamp", now())
                self.store(key, document)
                return
            del self.objects[key]
            self.resource_version += 1
            self.events.append((self.resource_version, "DELETED", key, document))
            uid = document["metadata"]["uid"]
            for other, owned in list(self.objects.items()):
                if any(owner["uid"] == uid for owner in owned["metadata"].get("ownerReferences", [])):
                    self.remove(other, at_once=at_once)
            self.changed.notify_all()

    def finish(self, plural: str, name: str) -> None:
        """Remove a lingering object."""
        self.remove(next(key for key in self.objects if key[1] == plural and key[3] == name), at_once=True)

    def forget(self) -> None:
        """Forget all changes so far: watches that continue from them are answered Gone."""
        with self.changed:
            self.oldest = self.resource_version + 1
            self.resource_version += 1
            self.events.clear()
            self.changed.notify_all()

    def trouble(self, verb: str, path: str, act: str, **options: Any) -> None:
        """Make requests fail: see :class:`Trouble`."""
        self.troubles.append(Trouble(verb, path, act, **options))

    def write(self, pod: str, *lines: str, container: str = "node", previous: bool = False, at: str = "") -> None:
        """Append lines to a container's log, all at the same time if ``at`` is given."""
        with self.changed:
            log = self.logs.setdefault((pod, container, previous), Log())
            log.lines += [(at or now(nanoseconds=True), line.encode()) for line in lines]
            self.changed.notify_all()

    def kubeconfig(self, file: Path, url: str, namespace: str = "") -> Path:
        """Write a kubeconfig for this server."""
        context = {"cluster": "test", "user": "test"} | ({"namespace": namespace} if namespace else {})
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": url}}],
            "users": [{"name": "test", "user": {"token": self.token or "a-token"}}],
            "contexts": [{"name": "test", "context": context}],
        }
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        return file


def clone(document: Any) -> Any:
    """Return a deep copy; definitions of types are large, and this is the fastest way."""
    return json.loads(json.dumps(document))


def now(*, nanoseconds: bool = False) -> str:
    """Return the time as the API writes it."""
    moment = datetime.datetime.now(datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S" + (".%f" + "000" if nanoseconds else "") + "Z")


def matcher(selector: str) -> Callable[[Document], bool]:
    """Return a function that checks an object's labels against a label selector."""
    terms = [term.strip() for term in re.split(r",(?![^(]*\))", selector) if term.strip()]

    def meets(labels: dict[str, str], term: str) -> bool:
        if match := re.fullmatch(r"(\S+) (in|notin) \(([^)]*)\)", term):
            values = [value.strip() for value in match[3].split(",")]
            return (labels.get(match[1]) in values) == (match[2] == "in")
        if match := re.fullmatch(r"([^!=]+)(!=|==?)(.*)", term):
            return (labels.get(match[1].strip()) == match[3].strip()) == (match[2] != "!=")
        return (term.lstrip("!") in labels) != term.startswith("!")

    return lambda document: all(meets(document["metadata"].get("labels") or {}, term) for term in terms)


def field_matcher(selector: str) -> Callable[[Document], bool]:
    """Return a function that checks an object against a field selector of equalities."""
    terms = [re.split("==?", term, maxsplit=1) for term in selector.split(",") if term]

    def value(document: Document, path: str) -> str:
        found: Any = document
        for part in path.split("."):
            found = (found or {}).get(part)
        return str(found or "")

    return lambda document: all(value(document, path) == wanted for path, wanted in terms)


def merge(base: Any, change: Any) -> Any:
    """Merge a patch as in RFC 7386."""
    if not isinstance(change, dict):
        return clone(change)
    merged = dict(base) if isinstance(base, dict) else {}
    for name, value in change.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def with_defaults(document: Document) -> Document:
    """Return an object with a server's defaults: pods in core kinds get the fields that were left out."""

    def complete(value: Any) -> Any:
        if isinstance(value, list):
            return [complete(each) for each in value]
        if not isinstance(value, dict):
            return value
        done = {name: complete(each) for name, each in value.items()}
        if "containers" in done:
            done = {"dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"} | done
            extra = {"terminationMessagePath": "/dev/termination-log", "imagePullPolicy": "IfNotPresent"}
            done["containers"] = [extra | container for container in done["containers"]]
        return done

    if document.get("apiVersion") not in ("v1", "batch/v1") or "spec" not in document:
        return document
    return document | {"spec": complete(document["spec"])}


def status_of(code: int, reason: str, message: str, **details: Any) -> Document:
    """Return a failure as an API Status object."""
    answer = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    return clone(answer | {"reason": reason, "details": details, "code": code})
