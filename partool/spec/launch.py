"""The ``launch`` section: where and how the run starts, on this machine, under Slurm or on Kubernetes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from partool.spec._base import Auto, OneOf, Section
from partool.spec.numbers import Ranks, Seconds, Times, TimesOrNone
from partool.spec.patterns import (
    Argument,
    DnsName,
    FilePath,
    Image,
    Key,
    MountSource,
    MountTarget,
    VariableName,
    VariableValue,
    WebAddress,
)
from partool.spec.targets.k8s.section import K8sSpec
from partool.spec.targets.slurm.section import SlurmSpec
from partool.strategies.targets import TARGETS

TargetName = Annotated[str, OneOf(TARGETS)]
SHORTEST_WINDOW_S = 60
"""Shortest time for a checkpoint that ``shutdown_timeout_s: auto`` gives, also where steps take milliseconds."""
Occasion = Literal["end", "failure", "stall"]
NetworkPreset = Literal["auto", "none", "ib", "roce", "efa", "slingshot", "tcp"]


class Secret(Section):
    """The source of a secret variable; the launcher never reads its value."""

    file: FilePath | None = None
    """File with the value, which each node reads as its ranks start (local, torchrun, slurm)."""
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
    """True: ranks cannot write there."""


class NotifySpec(Section):
    """What the agent of the first node runs or calls; one of command, webhook and webhook_env."""

    command: Annotated[list[Argument], Field(min_length=1)] | None = None
    """A program and its arguments; it gets the run as JSON on standard input."""
    webhook: WebAddress | None = None
    """Address to which the JSON is posted."""
    webhook_env: VariableName | None = None
    """Environment variable with that address, for addresses that hold a key (also from ``launch.secrets``)."""
    on: Annotated[list[Occasion], Field(min_length=1)] = ["end", "failure", "stall"]
    """end: the run is done, or was stopped; failure: it failed for good; stall: a rank makes no progress."""


class LaunchSpec(Section):
    """The place where the run starts, and how it starts there."""

    target: TargetName = "local"
    """``torchrun`` only renders one command per node, for people who start nodes by hand."""
    restarts: TimesOrNone = 0
    """Restarts from the last checkpoint after a failure: of the ranks only (local), or of the whole job."""
    requeues: TimesOrNone = 20
    """Times a preempted Slurm job goes back to the queue."""
    same_failure: Times = 3
    """Equal failures in a row after which the run ends for good, if none got further than the failure before."""
    min_nodes: Ranks | None = None
    """Slurm: smallest number of nodes with which the run may start or go on, if data parallelism allows fewer nodes."""
    shutdown_timeout_s: Seconds | Auto = "auto"
    """Time for a checkpoint after a stop signal, before ranks are killed; ``auto``: the predicted time of a step, at
    its upper error bar, and of writing a checkpoint, at least 60 s."""
    watchdog: Literal["auto", "off"] | Seconds = "auto"
    """Seconds without progress in a step after which the ranks count as stalled: their stacks are written, and the run
    fails or restarts. auto: 3 steps and a minute for a process that a signal has stopped, 8 steps and a minute for
    another one, by the predicted or the measured step time, whichever is longer. Loading, compiling, validating and
    saving have at least an hour."""
    env: dict[VariableName, VariableValue] = {}
    """Environment variables of every rank."""
    secrets: dict[VariableName, Secret] = {}
    """Secret environment variables of every rank, by reference."""
    network: NetworkPreset = "none"
    """Environment of the network libraries, from partool's tables; ``auto`` follows ``hardware.fabric``."""
    numa: Literal["auto", "none"] = "auto"
    """auto: each rank stays on the cores and the memory next to its device."""
    python: FilePath | None = None
    """Interpreter on the nodes; default: the launcher's interpreter (local, slurm), ``python3`` of the shell
    (torchrun), or ``python`` in an image."""
    image: Image | None = None
    """Container image with partool or the other engine (k8s; slurm with ``container``), or an apptainer file."""
    mounts: list[Mount] = []
    """Folders and volumes inside the containers."""
    slurm: SlurmSpec = SlurmSpec()
    """Used with the target slurm."""
    k8s: K8sSpec = K8sSpec()
    """Used with the target k8s."""
    notify: NotifySpec | None = None
    """Who is told when the run ends, fails or stalls."""

    @property
    def window_s(self) -> int:
        """Seconds between a request to stop and the end of ranks that have not stopped.

        While no plan has decided on ``shutdown_timeout_s: auto``, this is the shortest time that a plan may choose.
        """
        return SHORTEST_WINDOW_S if self.shutdown_timeout_s == "auto" else self.shutdown_timeout_s
