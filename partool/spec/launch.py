"""The ``launch`` section: where and how the run starts, on this machine, under Slurm or on Kubernetes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from partool.spec._base import Section
from partool.spec.numbers import Cores, Pieces, Ranks, Seconds, SecondsOrNone, Times, TimesOrNone
from partool.spec.patterns import (
    Claim,
    DnsLabel,
    DnsName,
    FilePath,
    GpuType,
    Image,
    Key,
    Label,
    LabelKey,
    Memory,
    MountSource,
    MountTarget,
    Option,
    OptionName,
    OptionOrNothing,
    Quantity,
    TimeLimit,
    VariableName,
    VariableValue,
)

TargetName = Literal["local", "torchrun", "slurm", "k8s"]
K8sKind = Literal["jobset", "job", "pytorchjob", "trainjob", "volcano"]
LABEL_DOMAIN = "partool.dev"
"""Before the names of partool's own labels and annotations."""
NetworkPreset = Literal["auto", "none", "ib", "roce", "efa", "slingshot", "tcp"]


class Secret(Section):
    """Where a secret variable comes from; its value is never read by the launcher."""

    file: FilePath | None = None
    """Its content, read on the node as the ranks start (local, torchrun, slurm)."""
    secret: DnsName | None = None
    """Name of a Kubernetes Secret (k8s)."""
    key: Key | None = None
    """Key within the Kubernetes Secret."""


class Mount(Section):
    """A folder of the node, or a Kubernetes volume claim, inside the container."""

    source: MountSource
    """Path on the node, or ``pvc:CLAIM``."""
    target: MountTarget
    """Absolute path inside the container."""
    read_only: bool = False
    """True mounts it so that ranks cannot write there."""


class SlurmSpec(Section):
    """What a site's Slurm wants to know. What is not set here can come from the site's profile."""

    profile: FilePath | None = None
    """Site profile: a YAML file with fields of this section, which those written here override."""
    partition: Option | None = None
    """Default: the cluster's own."""
    account: Option | None = None
    """Whom the job is charged to; default: the user's own account."""
    qos: Option | None = None
    """Quality of service."""
    reservation: Option | None = None
    """Reserved nodes to take the job's from."""
    constraint: Option | None = None
    """Features that the nodes must have, such as ``h100&ib``."""
    nodelist: Option | None = None
    """Nodes that must be among the job's, such as ``gpu[01-04]``."""
    exclude: Option | None = None
    """Nodes that must not be among them."""
    time: TimeLimit | None = None
    """Time limit as Slurm writes it: ``D-HH:MM:SS``, ``HH:MM:SS`` or minutes; default: the partition's."""
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How this site asks for devices; ``none`` where whole nodes are given anyway."""
    gpu_type: GpuType | None = None
    """Name of the device type in the site's GRES (``gpu:h100:8``)."""
    exclusive: bool = True
    """Take whole nodes."""
    memory: Memory | None = None
    """Per node (``--mem``); default: all of it (0) with ``exclusive``, else the partition's."""
    cpus_per_task: Cores | None = None
    """Cores of the one task per node; default: all of the node's with ``exclusive``, where they are known."""
    signal_lead_s: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Seconds before the time limit at which the run checkpoints; default: the shutdown timeout and 90 s more."""
    container: Literal["none", "pyxis", "apptainer"] = "none"
    """What starts ``launch.image``."""
    setup: FilePath | None = None
    """Shell script on the nodes that is sourced before the agent starts (``module load`` and the like)."""
    options: dict[OptionName, OptionOrNothing] = {}
    """More sbatch options, long names without dashes; an empty value for those that take none."""


class Toleration(Section):
    """A taint of nodes that the pods bear."""

    key: LabelKey
    """Of the taint."""
    value: Label | None = None
    """None tolerates every value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """None tolerates every effect."""


class Rdma(Section):
    """Network adapters as a resource, as the cluster's device plugin names it."""

    resource: LabelKey
    """``rdma/hca_shared_devices_a``, ``nvidia.com/sriov-ib``, ``vpc.amazonaws.com/efa``."""
    count: Pieces = 1
    """Per pod."""


class Topology(Section):
    """Kueue's topology-aware placement."""

    level: LabelKey
    """Label of the nodes that names the domain, such as ``cloud.provider.com/topology-rack``."""
    required: bool = False
    """True waits until all pods fit one domain; False only prefers it."""


class K8sSpec(Section):
    """What a Kubernetes cluster wants to know."""

    kind: K8sKind = "jobset"
    """Object that is made: ``job`` needs no controller but a Service, the others need theirs installed."""
    namespace: DnsLabel | None = None
    """Default: the context's."""
    context: Annotated[str, Field(max_length=253)] | None = None
    """Of the kubeconfig; default: the current one."""
    queue: DnsName | None = None
    """Kueue's LocalQueue, or Volcano's queue with ``kind: volcano``."""
    priority: DnsName | None = None
    """Kueue's workload priority class with ``queue``, else a PriorityClass."""
    topology: Topology | None = None
    """Where the pods are to be close to each other, with ``queue``."""
    node_selector: dict[LabelKey, Label] = {}
    """Labels that the nodes must have, such as ``nvidia.com/gpu.product``."""
    tolerations: list[Toleration] = []
    """Taints that the pods bear, beside those of the devices."""
    cpu: Quantity | None = None
    """Per pod; default: the catalog host's cores, less two."""
    memory: Quantity | None = None
    """Per pod, limit and request; default: what the plan predicts for the host and the shared memory, with room."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm; its pages count against ``memory``. Default: 8Gi per device, 1Gi per rank on a CPU."""
    ephemeral_storage: Quantity | None = None
    """Of the node's disk per pod, for /tmp and, without ``storage``, the run; 0: no limit; default: 20Gi and more."""
    device_resource: LabelKey | None = None
    """Default: ``nvidia.com/gpu`` or ``amd.com/gpu``."""
    rdma: Rdma | None = None
    """Network adapters for the pods; with them comes the right to lock memory (IPC_LOCK)."""
    host_network: bool = False
    """Use the node's network; for sites that require it."""
    storage: Claim | None = None
    """``pvc:CLAIM`` that keeps runs (checkpoints, logs, events) under ``runs``; default: lost with the pod."""
    writable_root: bool = False
    """True lets the ranks write anywhere in their image, not only to /tmp and mounts."""
    evictable: bool = False
    """True lets the cluster autoscaler and Karpenter move pods to save nodes, which costs steps."""
    network_policy: bool = False
    """True adds a NetworkPolicy: only the run's own pods may reach the ports of its agents and ranks."""
    user: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1000
    """User and group of the processes; 0 is root."""
    service_account: DnsName | None = None
    """Its token is not mounted."""
    image_pull_secrets: list[DnsName] = []
    """Names of Secrets with the registry's password."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Default: Kubernetes' own, which goes by the tag."""
    labels: dict[LabelKey, Label] = {}
    """On the object and its pods."""
    annotations: dict[LabelKey, Annotated[str, Field(max_length=65536)]] = {}
    """On the object and its pods."""
    keep_finished_s: SecondsOrNone = 86400
    """Time after which a finished job is deleted."""
    deadline_s: Seconds | None = None
    """Longest time that the job may be active."""
    runtime: DnsName = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob."""


class LaunchSpec(Section):
    """Where and how the run starts."""

    target: TargetName = "local"
    """``torchrun`` renders one command per node, for people who start nodes by hand."""
    restarts: TimesOrNone = 0
    """Restarts after a failure, from the last checkpoint: of the ranks in place (local), or of the whole job."""
    requeues: TimesOrNone = 20
    """Times a preempted Slurm job goes back to the queue."""
    same_failure: Times = 3
    """The same failure so many times in a row, each no further than the one before, ends the run for good."""
    min_nodes: Ranks | None = None
    """Slurm: begin or go on with fewer nodes than ``hardware.nodes``, down to these, where data parallelism allows."""
    shutdown_timeout_s: Seconds = 60
    """Time for a checkpoint after a stop signal, before ranks are killed."""
    env: dict[VariableName, VariableValue] = {}
    """Environment variables of every rank."""
    secrets: dict[VariableName, Secret] = {}
    """Secret environment variables of every rank, by reference."""
    network: NetworkPreset = "none"
    """Environment of the network libraries, from partool's own tables; ``auto`` goes by ``hardware.fabric``."""
    numa: Literal["auto", "none"] = "auto"
    """auto: each rank stays on the cores and the memory next to its device."""
    python: FilePath | None = None
    """Interpreter on the nodes; default: the launcher's own (local, slurm), ``python3`` of the shell (torchrun),
    or ``python`` in an image."""
    image: Image | None = None
    """Container image with partool in it (k8s; slurm with ``container``), or an apptainer file."""
    mounts: list[Mount] = []
    """Folders and volumes inside the containers."""
    slurm: SlurmSpec = SlurmSpec()
    """Used with the target slurm."""
    k8s: K8sSpec = K8sSpec()
    """Used with the target k8s."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run's folder (extra ``tensorboard``)."""
