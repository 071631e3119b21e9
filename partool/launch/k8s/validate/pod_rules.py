"""Rules of pods: resources, security, and shells that would not pass signals on to the agent.

Sources: https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/,
https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/ and the pages on the pod lifecycle.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from partool.diagnostics.secrets import in_variable
from partool.launch.k8s.validate.findings import FieldFault, at
from partool.launch.k8s.validate.forms import parse_quantity
from partool.launch.k8s.validate.manifest import DocumentPart, Manifest, select

_SHELLS = {"sh", "bash", "dash", "ash", "zsh"}
_NATIVE = re.compile(r"cpu|memory|ephemeral-storage|hugepages-.+")
_MOST_ANNOTATIONS_BYTES = 256 * 1024


def requests_and_limits(manifest: Manifest) -> Iterator[FieldFault]:
    """Find requests above their limits, and device requests that are not whole numbers or differ from their limits."""
    for part in _resources(manifest):
        requests, limits = part.part("requests").value, part.part("limits").value
        for name in requests:
            asked, most = parse_quantity(requests[name]), parse_quantity(limits.get(name))
            if _is_device(name) and name not in limits:
                yield at(part, "requests", name, text="devices must be in limits; a request alone is refused")
            elif asked is not None and most is not None and asked > most:
                yield at(part, "requests", name, text=f"{requests[name]} is above the limit {limits[name]}")
            elif _is_device(name) and asked != most:
                yield at(part, "requests", name, text=f"{requests[name]} must equal the limit {limits[name]}")
        for where, table in (("requests", requests), ("limits", limits)):
            for name, value in table.items():
                number = parse_quantity(value)
                if _is_device(name) and number is not None and number != int(number):
                    yield at(part, where, name, text=f"{value}: devices are whole")
                if isinstance(name, str) and "/" not in name and not _NATIVE.fullmatch(name):
                    yield at(part, where, name, text="is no resource of Kubernetes; others have a domain before a /")


def shared_memory(manifest: Manifest) -> Iterator[FieldFault]:
    """Find memory volumes as large as their container's memory limit: a volume's contents count against the limit."""
    for pods in manifest.pods:
        for volume in pods.spec.parts("volumes"):
            size = parse_quantity(volume.get("emptyDir", "sizeLimit"))
            if volume.get("emptyDir", "medium") != "Memory":
                continue
            if size is None:
                yield at(volume, "emptyDir", "sizeLimit", text="is missing: the volume could fill the node's memory")
                continue
            for container in pods.containers:
                limit = parse_quantity(container.get("resources", "limits", "memory"))
                if limit is not None and size >= limit and _mounts(container, volume):
                    text = f"{volume.get('emptyDir', 'sizeLimit')} counts against the container's memory limit"
                    yield at(
                        volume, "emptyDir", "sizeLimit", text=f"{text} {container.get('resources', 'limits', 'memory')}"
                    )


def exec_form(manifest: Manifest) -> Iterator[FieldFault]:
    """Find shells that stay a pod's first process: such a shell does not pass the stop signal on to the agent."""
    holders = [container for pods in manifest.pods for container in pods.containers]
    holders += [document.part("spec", "trainer") for document in manifest.of("TrainJob", "trainer.kubeflow.org")]
    for container in holders:
        words = [*_words(container, "command"), *_words(container, "args")]
        if not words or PurePosixPath(words[0]).name not in _SHELLS:
            continue
        scripts = [after for word, after in itertools.pairwise(words) if re.fullmatch(r"-[a-z]*c", word)]
        if not scripts or not re.split(r"\n|;|&&", scripts[0].strip())[-1].strip().startswith("exec "):
            text = f"{words[0]} would be the first process and keep the stop signal from the agent"
            yield at(container, "command", text=text, help="start the program itself, or put exec before it")


def literal_secrets(manifest: Manifest) -> Iterator[FieldFault]:
    """Find variables with a secret's value in the manifest; the finding does not repeat the value."""
    for path_owner in _variables(manifest):
        name, value = path_owner.text("name"), path_owner.text("value")
        if name is not None and value is not None and in_variable(name, value):
            help = "take it from a Secret, with valueFrom: {secretKeyRef: {name: NAME, key: KEY}}"
            yield at(path_owner, "value", text=f"{name} looks like a secret with its value written out", help=help)


def security(manifest: Manifest) -> Iterator[FieldFault]:
    """Find contradictory security settings, with which the pod is refused or its container never starts."""
    for pods in manifest.pods:
        for container in pods.containers:
            of_container, of_pod = container.part("securityContext"), pods.spec.part("securityContext")
            user = of_pod.get("runAsUser") if of_container.get("runAsUser") is None else of_container.get("runAsUser")
            not_root = (
                of_pod.get("runAsNonRoot")
                if of_container.get("runAsNonRoot") is None
                else of_container.get("runAsNonRoot")
            )
            if user == 0 and not isinstance(user, bool) and not_root is True:
                yield at(of_container, "runAsUser", text="is root, and runAsNonRoot is true")
            added = of_container.get("capabilities", "add")
            powerful = of_container.get("privileged") is True or (isinstance(added, list) and "SYS_ADMIN" in added)
            if of_container.get("allowPrivilegeEscalation") is False and powerful:
                text = "cannot be false for a privileged container, or with SYS_ADMIN"
                yield at(of_container, "allowPrivilegeEscalation", text=text)


def token(manifest: Manifest) -> Iterator[FieldFault]:
    """Find pods that get a token of the API, which training never needs."""
    for pods in manifest.pods:
        if not pods.is_patch and pods.spec.get("automountServiceAccountToken") is not False:
            yield at(pods.spec, "automountServiceAccountToken", text="must be false: ranks need no access to the API")


def tolerations(manifest: Manifest) -> Iterator[FieldFault]:
    """Find tolerations that the server refuses."""
    for pods in manifest.pods:
        for each in pods.spec.parts("tolerations"):
            if each.get("operator") == "Exists" and each.get("value"):
                yield at(each, "value", text="cannot go with operator Exists")
            if not each.get("key") and each.get("operator") != "Exists":
                yield at(each, "operator", text="must be Exists where there is no key")
            if each.get("tolerationSeconds") is not None and each.get("effect") != "NoExecute":
                yield at(each, "tolerationSeconds", text="needs the effect NoExecute")


def host_network(manifest: Manifest) -> Iterator[FieldFault]:
    """Find pods on the host network that cannot resolve pod names, or whose host and container ports differ."""
    for pods in manifest.pods:
        if pods.spec.get("hostNetwork") is not True:
            continue
        if pods.spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
            text = "must be ClusterFirstWithHostNet with hostNetwork, or names of pods are not found"
            yield at(pods.spec, "dnsPolicy", text=text)
        for container in pods.containers:
            for port in container.parts("ports"):
                if port.get("hostPort") not in (None, port.get("containerPort")):
                    yield at(port, "hostPort", text="must equal containerPort with hostNetwork")


def annotation_sizes(manifest: Manifest) -> Iterator[FieldFault]:
    """Find annotations of more than 256 KiB in total, which the server refuses."""
    for part in [*manifest.documents, *(pods.template for pods in manifest.pods)]:
        annotations = part.part("metadata", "annotations").value.items()
        size_bytes = sum(len(str(key).encode()) + len(str(value).encode()) for key, value in annotations)
        if size_bytes > _MOST_ANNOTATIONS_BYTES:
            text = f"{size_bytes} bytes; at most {_MOST_ANNOTATIONS_BYTES}"
            yield at(part, "metadata", "annotations", text=text)


def missing_parts(manifest: Manifest) -> Iterator[FieldFault]:
    """Find templates without containers, containers without a name or an image, pull secrets without a name."""
    for pods in manifest.pods:
        for secret in pods.spec.parts("imagePullSecrets"):
            if not secret.text("name"):
                yield at(secret, "name", text="is missing")
        if pods.is_patch:
            continue
        if not pods.spec.parts("containers"):
            yield at(pods.spec, "containers", text="there must be at least one")
        for container in pods.containers:
            for field in ("name", "image"):
                if not container.text(field):
                    yield at(container, field, text="is missing")
            for mount in container.parts("volumeMounts"):
                for field in ("name", "mountPath"):
                    if not mount.text(field):
                        yield at(mount, field, text="is missing")


def _resources(manifest: Manifest) -> Iterator[DocumentPart]:
    for pods in manifest.pods:
        for container in pods.containers:
            yield container.part("resources")
    for document in manifest.of("TrainJob", "trainer.kubeflow.org"):
        yield document.part("spec", "trainer", "resourcesPerNode")


def _variables(manifest: Manifest) -> Iterator[DocumentPart]:
    for pods in manifest.pods:
        for container in pods.containers:
            yield from container.parts("env")
    for document in manifest.of("TrainJob", "trainer.kubeflow.org"):
        yield from document.parts("spec", "trainer", "env")


def _is_device(name: object) -> bool:
    """Return True for the name of a device plugin's resource: GPUs, adapters."""
    return isinstance(name, str) and "/" in name and not name.startswith("kubernetes.io/")


def _mounts(container: DocumentPart, volume: DocumentPart) -> bool:
    names = [name for _, name in select(container.value, "volumeMounts.*.name")]
    return volume.get("name") in names


def _words(container: DocumentPart, field: str) -> list[str]:
    value = container.get(field)
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []
