"""The section ``launch.slurm``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from partool.spec._base import Section
from partool.spec.numbers import Cores
from partool.spec.patterns import FilePath, GpuType, Memory, Option, OptionName, OptionOrNothing, TimeLimit


class SlurmSpec(Section):
    """Settings of a site's Slurm. Fields that are not set here can come from a site profile."""

    profile: FilePath | None = None
    """Site profile: a YAML file with fields of this section, which fields written here override."""
    partition: Option | None = None
    """Partition of the job; default: the cluster's."""
    account: Option | None = None
    """Account that is charged for the job; default: the user's account."""
    qos: Option | None = None
    """Quality of service."""
    reservation: Option | None = None
    """Reservation that the job's nodes come from."""
    constraint: Option | None = None
    """Features that the nodes must have, such as ``h100&ib``."""
    nodelist: Option | None = None
    """Nodes that must be among the job's, such as ``gpu[01-04]``."""
    exclude: Option | None = None
    """Nodes that must not be among the job's."""
    time: TimeLimit | None = None
    """Time limit as Slurm writes it: ``D-HH:MM:SS``, ``HH:MM:SS`` or minutes; default: the partition's."""
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """sbatch option that requests devices at this site; ``none`` if jobs get whole nodes anyway."""
    gpu_type: GpuType | None = None
    """Name of the device type in the site's GRES (``gpu:h100:8``)."""
    exclusive: bool = True
    """Take whole nodes."""
    memory: Memory | None = None
    """Memory per node (``--mem``); default: all of it (0) with ``exclusive``, else the partition's."""
    cpus_per_task: Cores | None = None
    """Cores of the one task per node; default with ``exclusive``: all of the node's cores, if their number is known."""
    signal_lead_s: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Seconds before the time limit at which the run writes a checkpoint; default: the shutdown timeout plus 90 s."""
    container: Literal["none", "pyxis", "apptainer"] = "none"
    """Container runtime that starts ``launch.image``."""
    setup: FilePath | None = None
    """Shell script on the nodes that is sourced before the agent starts (``module load`` and the like)."""
    options: dict[OptionName, OptionOrNothing] = {}
    """More sbatch options, by long name without dashes; an empty value, or ``true``, for options that take none."""
