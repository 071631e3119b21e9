"""Volumes of a pod and their mount points in its container."""

from __future__ import annotations

import posixpath

from partool.render.job import Job
from partool.render.k8s.manifest import Fields
from partool.render.k8s.objects import plan_map
from partool.render.k8s.resources import ephemeral_storage
from partool.spec.targets.k8s.rules import POD_SCRATCH, POD_STORAGE, shared_memory

PLAN_FOLDER = "/etc/partool"
_PVC = "pvc:"


def volumes(job: Job) -> tuple[list[Fields], list[Fields]]:
    """Return the pod's volumes and the container's mounts.

    A claim is one volume even if it is mounted several times. The whole claim is mounted, because only root could
    use a folder that Kubernetes creates for a ``subPath``.
    """
    launch = job.plan.launch
    shm = {"medium": "Memory", "sizeLimit": shared_memory(job.plan.launch, job.plan.devices)}
    sources: list[Fields] = [
        {"name": "plan", "configMap": {"name": plan_map(job), "defaultMode": 0o444}},
        {"name": "shm", "emptyDir": shm},
    ]
    seen: list[Fields] = [
        {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    disk = {"sizeLimit": ephemeral_storage(job.plan)}
    if not any(posixpath.normpath(mount.target) == POD_SCRATCH for mount in launch.mounts):
        sources.append({"name": "tmp", "emptyDir": disk})
        seen.append({"name": "tmp", "mountPath": POD_SCRATCH})
    claims: dict[str, str] = {}
    if launch.k8s.storage is None:
        sources.append({"name": "runs", "emptyDir": disk})
    else:
        sources.append(_claim("runs", launch.k8s.storage))
        claims[launch.k8s.storage] = "runs"
    seen.append({"name": "runs", "mountPath": POD_STORAGE})
    for index, mount in enumerate(launch.mounts):
        name = claims.get(mount.source, f"mount-{index}")
        if mount.source not in claims:
            sources.append(_claim(name, mount.source) if mount.source.startswith(_PVC) else _folder(name, mount.source))
            claims[mount.source] = name
        seen.append({"name": name, "mountPath": mount.target} | ({"readOnly": True} if mount.read_only else {}))
    return sources, seen


def _claim(name: str, source: str) -> Fields:
    return {"name": name, "persistentVolumeClaim": {"claimName": source.removeprefix(_PVC)}}


def _folder(name: str, path: str) -> Fields:
    # Without a type, a folder that a node lacks would be created empty.
    return {"name": name, "hostPath": {"path": path, "type": "Directory"}}
