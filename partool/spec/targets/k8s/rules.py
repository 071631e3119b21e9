"""Rules about ``launch.k8s``, and about other fields of ``launch`` that mean something else in a pod."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.hardware import Devices
from partool.spec.launch import LaunchSpec
from partool.spec.numbers import duration
from partool.spec.patterns import is_image_file, within
from partool.spec.targets.k8s.notices import notice
from partool.spec.targets.k8s.section import LABEL_DOMAIN, K8sSpec
from partool.spec.targets.rules import Forecast, TargetRules

POD_STORAGE = "/partool"
"""Folder of runs in a pod. ``launch.k8s.storage`` is mounted there; without it, the folder is lost with the pod."""
POD_SCRATCH = "/tmp"
"""Folder that ranks can write to in any pod; its files are lost with the pod."""
_POD_FOLDERS = (POD_STORAGE, "/etc/partool", "/dev/shm", "/dev/termination-log")
"""Folders in a pod that partool mounts, or where the agent writes files for Kubernetes."""
_LEAST_SHARED_BYTES = 1 << 30
"""Least bytes of shared memory per device, for NCCL's rings and the data loaders' queues. The default of containers,
64 MiB, fails (NCCL #290)."""
_SHARED_GIB = {"cuda": 8, "rocm": 8, "cpu": 1}
"""GiB of /dev/shm per rank, for NCCL's rings and the data loaders' queues; gloo needs no /dev/shm."""
_PATH = ("launch", "k8s")
_CORES_KEPT = 2
"""Cores left to the kubelet and the other daemons that run on every node."""
_NETWORKS = {"k8s.v1.cni.cncf.io/networks", "networking.gke.io/interfaces"}
"""Annotations that attach more networks to a pod: Multus (https://github.com/k8snetworkplumbingwg/multus-cni), and
GKE's multi-networking."""
_OWN_KEYS = (
    f"{LABEL_DOMAIN}/",
    "kueue.x-k8s.io/queue-name",
    "kueue.x-k8s.io/priority-class",
    "app.kubernetes.io/managed-by",
)
_SUFFIXES = {
    "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip


def quantity(text: str) -> float:
    """Return a Kubernetes quantity as a number (``1500m`` → 1.5, ``2Gi`` → 2147483648); raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    if match is None or match[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * _SUFFIXES[match[2]]


def shared_memory(launch: LaunchSpec, devices: Devices) -> str:
    """Return the size of /dev/shm as a Kubernetes quantity."""
    return launch.k8s.shared_memory or f"{_SHARED_GIB[devices.backend] * devices.per_node}Gi"


def cpu_limit(launch: LaunchSpec, devices: Devices) -> str:
    """Return the container's number of cores as a Kubernetes quantity.

    By default these are all but two of the host's or, if the host is unknown, one for each thread of the ranks.
    """
    if launch.k8s.cpu is not None:
        return launch.k8s.cpu
    if devices.host_cores:
        return str(max(devices.host_cores - _CORES_KEPT, 1))
    return str(devices.per_node * max(devices.threads_per_rank, 1))


class K8sRules(TargetRules):
    """Rules of the target k8s."""

    def errors(self, launch: LaunchSpec) -> Iterator[Diagnostic]:
        """Yield errors: a missing or unusable image, and fields of the section that contradict each other."""
        yield from _image(launch)
        yield from _contradictions(launch.k8s)

    def warnings(self, launch: LaunchSpec) -> Iterator[Diagnostic]:
        """Yield warnings about settings that clusters refuse, or that lose the run's checkpoints."""
        if launch.k8s.user == 0:
            message = "user: 0 runs the ranks as root, which clusters with the restricted pod security standard refuse"
            yield Diagnostic("PT528", message, severity="warning", path=(*_PATH, "user"), help="use 1000, say")
        if launch.k8s.storage is None:
            message = "without storage: checkpoints and logs are in the pod, and are gone when it is replaced"
            help = "add launch: {k8s: {storage: 'pvc:CLAIM'}}"
            yield Diagnostic("PT528", message, severity="warning", path=(*_PATH, "storage"), help=help)

    def on_machines(self, launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
        """Warn of shared memory that is too small for the ranks of a node."""
        size = launch.k8s.shared_memory
        if size is not None and quantity(size) < _LEAST_SHARED_BYTES * devices.per_node:
            message = f"shared_memory: {size} is little for {devices.per_node} ranks: NCCL and data loaders need room"
            help = f"use {devices.per_node}Gi or more, or drop it"
            path = (*_PATH, "shared_memory")
            yield Diagnostic("PT528", message, severity="warning", path=path, help=help)

    def about_duration(self, launch: LaunchSpec, expected: Forecast) -> Iterator[Diagnostic]:
        """Warn of a deadline that ends the job before training does, and of nodes that end before a checkpoint."""
        deadline, total_s = launch.k8s.deadline_s, expected.total_s
        if deadline is not None and deadline < total_s:
            message = (
                f"deadline_s: {deadline} ends the job before training does, after {duration(total_s)} as predicted"
            )
            help = f"use {math.ceil(1.2 * total_s)}, say, or drop it"
            yield Diagnostic("PT527", message, severity="warning", path=(*_PATH, "deadline_s"), help=help)
        spot = notice(launch.k8s)
        if spot is not None and spot.seconds < expected.stop_s:
            message = (
                f"{spot.label} selects machines that end {spot.seconds} s after a notice ({spot.where}), and a stop "
                f"may take {expected.stop_s} s: {expected.stop_words}"
            )
            help = f"each such end can lose {expected.loss}; " + (
                "a shorter checkpoint.every loses less" if expected.saves else "add checkpoint: {every: 10min}, say"
            )
            yield Diagnostic("PT341", message, severity="warning", path=(*_PATH, *spot.path), help=help)

    def memory_limit(self, launch: LaunchSpec) -> tuple[tuple[str, ...], str, float] | None:
        """Return (keys of the field, value, bytes) of ``launch.k8s.memory``; None if partool computes the limit."""
        memory = launch.k8s.memory
        return None if memory is None else ((*_PATH, "memory"), memory, quantity(memory))

    def memory_beside_ranks(self, launch: LaunchSpec, devices: Devices) -> float:
        """Return the bytes of /dev/shm, whose pages count against a container's limit."""
        return quantity(shared_memory(launch, devices))

    def fabric_field(self, launch: LaunchSpec) -> tuple[str, ...] | None:
        """Return the keys of ``launch.k8s`` unless it gives the pods adapters, networks or the nodes' network."""
        k8s = launch.k8s
        attached = k8s.rdma is not None or k8s.host_network or bool(_NETWORKS & k8s.annotations.keys())
        return None if attached else _PATH

    def cores(self, launch: LaunchSpec, devices: Devices) -> float:
        """Return the container's limit, which may be a fraction."""
        return quantity(cpu_limit(launch, devices))

    def contained(self, launch: LaunchSpec) -> bool:
        """Return True: pods are containers."""
        return True

    def own_mounts(self, launch: LaunchSpec) -> dict[str, str]:
        """Return {folder of runs: volume claim} if ``launch.k8s.storage`` is set, else an empty dictionary."""
        return {} if launch.k8s.storage is None else {POD_STORAGE: launch.k8s.storage}

    def hides(self, folder: str) -> bool:
        """Return True if a folder is, contains or lies in a folder that partool mounts in pods."""
        return any(within(mounted, folder) or within(folder, mounted) for mounted in _POD_FOLDERS)

    def architecture(self, launch: LaunchSpec) -> tuple[tuple[str, ...], str] | None:
        """Return (keys of the field, value) of ``kubernetes.io/arch`` in ``node_selector``; None if it is not set."""
        label = "kubernetes.io/arch"
        named = launch.k8s.node_selector.get(label)
        return ((*_PATH, "node_selector", label), named) if named else None


def _image(launch: LaunchSpec) -> Iterable[Diagnostic]:
    path = ("launch", "image")
    if launch.image is None:
        help = (
            "write launch: {image: REGISTRY/NAME:TAG}: one with partool in it (deploy/ has Dockerfiles), or, for "
            "another engine, one with that training system and the script that trains"
        )
        yield Diagnostic("PT523", "pods need an image, and none is named", path=path, help=help)
    elif is_image_file(launch.image):
        message = f"{launch.image} is a file, and Kubernetes takes images from a registry"
        yield Diagnostic("PT523", message, path=path, help="write launch: {image: REGISTRY/NAME:TAG}")


def _contradictions(k8s: K8sSpec) -> Iterator[Diagnostic]:
    """Yield errors for fields that contradict each other, or that objects of the given ``kind`` do not support."""
    if k8s.memory and k8s.shared_memory and quantity(k8s.shared_memory) >= quantity(k8s.memory):
        message = f"shared_memory: {k8s.shared_memory} counts against memory: {k8s.memory}, and leaves nothing of it"
        help = "raise memory, or drop it: partool then adds the two up"
        yield Diagnostic("PT528", message, path=(*_PATH, "shared_memory"), help=help)
    if k8s.topology and (k8s.queue is None or k8s.kind == "volcano"):
        message = "topology is for Kueue, which places the pods only if queue: names its LocalQueue"
        help = "add queue: NAME" if k8s.kind != "volcano" else "use another kind, or drop topology"
        yield Diagnostic("PT528", message, path=(*_PATH, "topology"), help=help)
    if k8s.kind != "trainjob" and k8s.runtime != K8sSpec().runtime:
        message = f"runtime: {k8s.runtime} belongs to kind: trainjob, not to {k8s.kind}"
        yield Diagnostic("PT528", message, path=(*_PATH, "runtime"), help="set kind: trainjob, or drop it")
    if k8s.network_policy and k8s.host_network:
        message = "network_policy covers the pod network only, and host_network: true bypasses that"
        help = "drop one of the two; on the nodes' network only their firewall keeps others away"
        yield Diagnostic("PT528", message, path=(*_PATH, "network_policy"), help=help)
    for section in ("labels", "annotations"):
        for key in getattr(k8s, section):
            if key.startswith(_OWN_KEYS):
                help = "write launch.k8s.queue and launch.k8s.priority" if key.startswith("kueue") else "drop it"
                message = f"{key} is written by partool"
                yield Diagnostic("PT528", message, path=(*_PATH, section, key), help=help)


RULES = K8sRules()
