"""Resources that a pod requests from its node."""

from __future__ import annotations

import math

from partool.plan.host_memory import ranks_bytes
from partool.plan.types import Plan
from partool.spec.patterns import within
from partool.spec.targets.k8s.rules import POD_SCRATCH, POD_STORAGE, cpu_limit, quantity, shared_memory

_GIB = 1 << 30
_ROOM = 1.1
_SCRATCH_GIB = 20
"""GiB for the container's log, compilers' caches and token caches (assumed; public clouds' nodes have 40 or more)."""
DEVICES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
"""Backend → the resource of its vendor's device plugin, and the key of the usual taint of nodes with devices."""


def device_resource(plan: Plan) -> str | None:
    """Return the name of the resource by which the cluster counts devices; None for ranks on a CPU."""
    if plan.devices.backend == "cpu":
        return None
    return plan.launch.k8s.device_resource or resource_name(plan.devices.backend, plan.devices.slice)


def resource_name(backend: str, profile: str) -> str:
    """Return the device plugin's name for whole devices, or for slices of a MIG profile unless that is empty.

    Source: the strategy ``mixed`` of NVIDIA's device plugin, https://github.com/NVIDIA/k8s-device-plugin.
    """
    return f"nvidia.com/mig-{profile}" if profile else DEVICES[backend]


def ephemeral_storage(plan: Plan) -> str:
    """Return the limit on a pod's data on its node's disk: /tmp, caches and, without a claim, the run's folder."""
    k8s = plan.launch.k8s
    if k8s.ephemeral_storage is not None:
        return k8s.ephemeral_storage
    gib = _SCRATCH_GIB
    if _on_disk(plan, plan.checkpoint.dir or POD_STORAGE):
        kept = plan.checkpoint.keep + 1  # an old checkpoint is deleted only once the new one is complete
        gib += math.ceil(plan.prediction.memory.saved_bytes * plan.devices.per_node * kept * _ROOM / _GIB)
    return f"{gib}Gi"


def _on_disk(plan: Plan, path: str) -> bool:
    """Return True if files that a pod writes to ``path`` lie on the node's disk, False if in a mount or claim."""
    if any(within(path, mount.target) for mount in plan.launch.mounts):
        return False
    return within(path, POD_SCRATCH) or (within(path, POD_STORAGE) and plan.launch.k8s.storage is None)


def resources(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the container's resources. Requests of cores and memory equal the limits, so that pods are evicted last.

    Devices and adapters are written as limits only: Kubernetes uses the same values as requests.
    """
    base = {"cpu": cpu_limit(plan.launch, plan.devices), "memory": memory(plan)}
    limits = dict(base)
    device = device_resource(plan)
    if device is not None:
        limits[device] = str(plan.devices.per_node)
    rdma = plan.launch.k8s.rdma
    if rdma is not None:
        limits[rdma.resource] = str(rdma.count)
    return {"requests": {**base, "ephemeral-storage": ephemeral_storage(plan)}, "limits": limits}


def memory(plan: Plan) -> str:
    """Return the container's memory in whole GiB, rounded up: the ranks' host memory and /dev/shm, plus 10 %.

    The ranks' memory includes the copies that they make while they save. On a host with devices, the result is at most
    90 % of the host's memory: a pod that requests all fits no node.
    For ranks on a CPU there is no such bound, since the plan's host is then the machine that made the plan.
    """
    if plan.launch.k8s.memory is not None:
        return plan.launch.k8s.memory
    gib = math.ceil((ranks_bytes(plan) + quantity(shared_memory(plan.launch, plan.devices))) * _ROOM / _GIB)
    host = plan.devices.host_memory_bytes
    if host is not None and plan.devices.backend != "cpu":
        gib = max(1, min(gib, int(host * 0.9 / _GIB)))
    return f"{gib}Gi"
