"""The section ``launch.k8s``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from partool.spec._base import Section
from partool.spec.numbers import Pieces, Seconds, SecondsOrNone
from partool.spec.patterns import Claim, DnsLabel, DnsName, Label, LabelKey, Quantity

K8sKind = Literal["jobset", "job", "pytorchjob", "trainjob", "volcano"]
LABEL_DOMAIN = "partool.dev"
"""Prefix of partool's labels and annotations."""


class Toleration(Section):
    """A taint of nodes that the pods tolerate."""

    key: LabelKey
    """Key of the taint."""
    value: Label | None = None
    """Value of the taint; None tolerates every value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; None tolerates every effect."""


class Rdma(Section):
    """Network adapters that the pods request from the cluster's device plugin."""

    resource: LabelKey
    """Resource of the adapters: ``rdma/hca_shared_devices_a``, ``nvidia.com/sriov-ib``, ``vpc.amazonaws.com/efa``."""
    count: Pieces = 1
    """Adapters per pod."""


class Topology(Section):
    """Kueue's topology-aware placement."""

    level: LabelKey
    """Node label that names the domain, such as ``cloud.provider.com/topology-rack``."""
    required: bool = False
    """True: wait until all pods fit one domain; False: only prefer it."""


class K8sSpec(Section):
    """Settings of a Kubernetes cluster."""

    kind: K8sKind = "jobset"
    """Kind of object to create: ``job`` needs no controller, only a Service; other kinds need their controller."""
    namespace: DnsLabel | None = None
    """Namespace of the objects; default: the context's."""
    context: Annotated[str, Field(max_length=253)] | None = None
    """Context of the kubeconfig; default: the current one."""
    queue: DnsName | None = None
    """Kueue's LocalQueue, or Volcano's queue with ``kind: volcano``."""
    priority: DnsName | None = None
    """Kueue's workload priority class with ``queue``, else a PriorityClass."""
    topology: Topology | None = None
    """Placement of the pods close to each other, with ``queue``."""
    node_selector: dict[LabelKey, Label] = {}
    """Labels that the nodes must have, such as ``nvidia.com/gpu.product``."""
    tolerations: list[Toleration] = []
    """Taints that the pods tolerate, besides the taints of the devices."""
    cpu: Quantity | None = None
    """Cores per pod; default: two fewer than the catalog's host has."""
    memory: Quantity | None = None
    """Memory per pod, limit and request; default: predicted host memory plus shared memory, with a margin."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm; its pages count against ``memory``. Default: 8Gi per device, 1Gi per rank on a CPU."""
    ephemeral_storage: Quantity | None = None
    """Disk space per pod, for /tmp and, without ``storage``, the run; 0 sets no limit; default: at least 20Gi."""
    device_resource: LabelKey | None = None
    """Resource of the devices; default: ``nvidia.com/gpu`` or ``amd.com/gpu``."""
    rdma: Rdma | None = None
    """Network adapters of the pods, which then also get the right to lock memory (IPC_LOCK)."""
    host_network: bool = False
    """True: use the node's network, for sites that require it."""
    storage: Claim | None = None
    """``pvc:CLAIM`` that keeps runs (checkpoints, logs, events) under ``runs``; default: lost with the pod."""
    writable_root: bool = False
    """True: the ranks may write anywhere in their image, not only to /tmp and mounts."""
    evictable: bool = False
    """True: the cluster autoscaler and Karpenter may move pods to save nodes, which costs steps."""
    network_policy: bool = False
    """True: a NetworkPolicy lets only the run's own pods reach the ports of its agents and ranks."""
    user: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1000
    """User and group of the processes; 0 is root."""
    service_account: DnsName | None = None
    """Service account of the pods; its token is not mounted."""
    image_pull_secrets: list[DnsName] = []
    """Names of Secrets with passwords of the registry."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Pull policy; default: chosen by Kubernetes from the tag."""
    labels: dict[LabelKey, Label] = {}
    """Labels of the object and its pods."""
    annotations: dict[LabelKey, Annotated[str, Field(max_length=65536)]] = {}
    """Annotations of the object and its pods."""
    keep_finished_s: SecondsOrNone = 86400
    """Time after which a finished job is deleted."""
    deadline_s: Seconds | None = None
    """Longest time for which the job may be active."""
    runtime: DnsName = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob."""
