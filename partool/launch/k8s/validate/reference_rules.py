"""Rules for unique names and for references between fields and objects, which schemas cannot check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from partool.launch.k8s.validate.findings import FieldFault, at
from partool.launch.k8s.validate.manifest import DocumentPart, Manifest, Path, Pods, select

_UNIQUE_IN_POD = {
    "spec.volumes.*.name": "volume",
    "spec.imagePullSecrets.*.name": "pull secret",
}
_UNIQUE_IN_CONTAINER = {
    "env.*.name": "environment variable",
    "ports.*.name": "name of a port",
    "volumeMounts.*.mountPath": "mount path",
}
_UNIQUE_IN_DOCUMENT = {
    "spec.replicatedJobs.*.name": "replicated job",
    "spec.failurePolicy.rules.*.name": "rule",
    "spec.tasks.*.name": "task",
    "spec.ports.*.name": "name of a port",
    "spec.trainer.env.*.name": "environment variable",
    "spec.runtimePatches.*.manager": "manager of patches",
}
_NO_SOURCE = frozenset({"name"})


def duplicates(manifest: Manifest) -> Iterator[FieldFault]:
    """Find names that occur twice but must be unique."""
    for document in manifest.documents:
        yield from _doubled(document, _UNIQUE_IN_DOCUMENT)
    for pods in manifest.pods:
        yield from _doubled(pods.template, _UNIQUE_IN_POD)
        names = (((*each.path, "name"), each.get("name")) for each in pods.containers)
        yield from _twice(names, pods.template.owner, "container")
        for container in pods.containers:
            yield from _doubled(container, _UNIQUE_IN_CONTAINER)
            ports = (
                (p.path, f"{p.get('containerPort')}/{p.get('protocol') or 'TCP'}") for p in container.parts("ports")
            )
            yield from _twice(ports, container.owner, "port")


def objects_once(manifest: Manifest) -> Iterator[FieldFault]:
    """Find objects that have the same kind and name as an earlier object."""
    seen: set[tuple[object, ...]] = set()
    for document in manifest.documents:
        namespace = document.text("metadata", "namespace")
        key = (document.text("apiVersion"), document.owner, namespace)
        if key in seen:
            yield at(document, "metadata", "name", text="has the kind and name of an earlier object")
        seen.add(key)


def identities(manifest: Manifest) -> Iterator[FieldFault]:
    """Find objects without an apiVersion, kind or name, and manifests whose objects are in different namespaces."""
    spaces = {document.text("metadata", "namespace") for document in manifest.documents}
    for document in manifest.documents:
        for path in (("apiVersion",), ("kind",), ("metadata", "name")):
            if not document.text(*path):
                yield at(document, *path, text="is missing")
    if len(spaces) > 1:
        named = ", ".join(sorted(space or "the context's" for space in spaces))
        last = manifest.documents[-1]
        yield at(last, "metadata", "namespace", text=f"the objects of one run are in different namespaces: {named}")


def mounts(manifest: Manifest) -> Iterator[FieldFault]:
    """Find mounts of missing volumes, volumes that no container mounts, and volumes without exactly one source."""
    for pods in manifest.pods:
        volumes = pods.spec.parts("volumes")
        names = {volume.text("name") for volume in volumes}
        mounted = set()
        for container in pods.containers:
            for mount in container.parts("volumeMounts"):
                mounted.add(mount.text("name"))
                if mount.text("name") not in names and not pods.is_patch:
                    yield at(mount, "name", text=f"the pod has no volume {mount.get('name')!r}")
                if ".." in (mount.text("subPath") or "").split("/") or (mount.text("subPath") or "").startswith("/"):
                    yield at(mount, "subPath", text="must be relative, without ..")
        for volume in volumes:
            sources = sorted(volume.value.keys() - _NO_SOURCE, key=str)
            if len(sources) != 1:
                yield at(volume, text=f"must have one source, not {sources or 'none'}")
            if volume.text("name") not in mounted and not pods.is_patch:
                yield at(volume, text=f"no container mounts {volume.get('name')!r}")


def variable_sources(manifest: Manifest) -> Iterator[FieldFault]:
    """Find variables with both a value and a source, and variables without exactly one source."""
    for container in _containers(manifest):
        for variable in container.parts("env"):
            source = variable.get("valueFrom")
            if source is None:
                continue
            if variable.get("value") not in (None, ""):
                yield at(variable, text="has a value and a source; only one of them is allowed")
            if isinstance(source, dict) and len(source) != 1:
                yield at(variable, "valueFrom", text=f"must have one source, not {sorted(source, key=str) or 'none'}")
            for kind in ("secretKeyRef", "configMapKeyRef"):
                reference = variable.part("valueFrom", kind)
                for key in ("name", "key") if reference.value else ():
                    if not reference.text(key):
                        yield at(reference, key, text="is missing")


def config_maps(manifest: Manifest) -> Iterator[FieldFault]:
    """Find ConfigMaps, and keys of ConfigMaps, that the pods need but the manifest lacks."""
    by_name = {document.text("metadata", "name"): document for document in manifest.of("ConfigMap")}
    for pods in manifest.pods:
        for volume in pods.spec.parts("volumes"):
            source = volume.part("configMap")
            if not source.value or source.get("optional") is True:
                continue
            config_map = by_name.get(source.text("name"))
            if config_map is None:
                yield at(source, "name", text=f"the manifest has no ConfigMap {source.get('name')!r}")
                continue
            for item in source.parts("items"):
                if item.text("key") not in _keys(config_map):
                    yield at(item, "key", text=f"{config_map.owner} has no key {item.get('key')!r}")


def config_map_sizes(manifest: Manifest) -> Iterator[FieldFault]:
    """Find ConfigMaps that the server refuses: above 1 MiB, or with a key in both ``data`` and ``binaryData``."""
    for document in manifest.of("ConfigMap"):
        values = [value for _, value in select(document.value, "data.*") if isinstance(value, str)]
        size_bytes = sum(len(value.encode("utf-8", "surrogatepass")) for value in values)
        if size_bytes > 2**20:
            yield at(document, "data", text=f"{size_bytes} bytes; a ConfigMap holds at most {2**20}")
        for key in document.part("data").value.keys() & document.part("binaryData").value.keys():
            yield at(document, "binaryData", key, text="is in data too")


def services(manifest: Manifest) -> Iterator[FieldFault]:
    """Find headless Services that do not give the pods of a Job their names, and Jobs without a headless Service."""
    by_name = {service.text("metadata", "name"): service for service in manifest.of("Service")}
    for service in by_name.values():
        yield from _service(service, manifest.pods)
    for pods in manifest.pods:
        if pods.kind == "Job":
            wanted = pods.spec.text("subdomain")
            if wanted is None and (pods.count or 0) > 1:
                text = "is missing: without it and a headless Service of its name, the pods cannot find each other"
                yield at(pods.spec, "subdomain", text=text)
            elif wanted is not None and wanted not in by_name:
                yield at(pods.spec, "subdomain", text=f"the manifest has no Service {wanted!r}")


def _service(service: DocumentPart, all_pods: list[Pods]) -> Iterator[FieldFault]:
    name, selector = service.text("metadata", "name"), service.part("spec", "selector").value
    if service.get("spec", "clusterIP") != "None":
        yield at(service, "spec", "clusterIP", text='must be "None": only a headless Service names single pods')
    if service.get("spec", "publishNotReadyAddresses") is not True:
        text = "must be true: ranks meet before any pod is ready"
        yield at(service, "spec", "publishNotReadyAddresses", text=text)
    users = [pods for pods in all_pods if pods.spec.text("subdomain") == name]
    if not users:
        yield at(service, "metadata", "name", text="no pod has this name as its subdomain")
    for pods in users:
        if not selector or not selector.items() <= _labels(pods).items():
            yield at(service, "spec", "selector", text=f"does not select the pods of {pods.template.owner}")


def _labels(pods: Pods) -> dict[str, Any]:
    """Return the labels of the pods, including the labels that the Job controller adds."""
    name = pods.template.owner.partition("/")[2]
    added = {"job-name": name, "batch.kubernetes.io/job-name": name} if pods.kind == "Job" else {}
    return {**added, **pods.template.part("metadata", "labels").value}


def _keys(config_map: DocumentPart) -> set[object]:
    return config_map.part("data").value.keys() | config_map.part("binaryData").value.keys()


def _containers(manifest: Manifest) -> Iterator[DocumentPart]:
    for pods in manifest.pods:
        yield from pods.containers
    for document in manifest.of("TrainJob", "trainer.kubeflow.org"):
        yield document.part("spec", "trainer")


def _doubled(part: DocumentPart, table: dict[str, str]) -> Iterator[FieldFault]:
    for pattern, what in table.items():
        places = ((part.path + path, value) for path, value in select(part.value, pattern))
        yield from _twice(places, part.owner, what)


def _twice(places: Iterable[tuple[Path, object]], owner: str, what: str) -> Iterator[FieldFault]:
    seen = set()
    for path, value in places:
        if not isinstance(value, str):
            continue
        if value in seen:
            yield FieldFault(owner, path, f"the {what} {value!r} is already used")
        seen.add(value)
