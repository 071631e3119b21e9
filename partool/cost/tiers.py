"""How the training state that leaves the device is kept, moved and updated: what all layouts of a search share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from partool.plan.types import Layout
from partool.spec.parallel import Offload

MIB, GIB = 2**20, 2**30
BUFFERS = 4
"""Buckets of a state on disks in host memory: one is stepped, one read, one written, one to spare."""


@dataclass(frozen=True)
class Tiers:
    """What all layouts of a search share about what leaves the device."""

    optimizer: Literal["cpu", "nvme"] = "cpu"
    parameters: Literal["cpu", "nvme"] = "cpu"
    speculate: Literal["none", "deferred", "undo"] = "deferred"
    gradients: Literal["auto", "compute", "master"] = "auto"
    narrow_moments: bool = False
    """Moments on the host are bf16."""
    bucket_bytes: int = 0
    """Of gradients; 0: by the number of parameters."""
    buffers: int = BUFFERS
    threads: int = 0
    """Cores of a rank that update; 0: as many as memory keeps busy."""
    undo_bytes: int = 0
    """0: a share of the state."""


USUAL = Tiers()


def tiers_of(offload: Offload, *, on_disks: bool = False) -> Tiers:
    """Return what a spec asks for; ``on_disks``: an open optimizer's state goes to files."""
    asked = offload.speculate
    gradients: dict[str, Literal["compute", "master"]] = {"bf16": "compute", "fp32": "master"}
    return Tiers(
        optimizer="nvme" if offload.optimizer == "nvme" or (offload.optimizer == "auto" and on_disks) else "cpu",
        parameters="nvme" if offload.parameters == "nvme" else "cpu",
        speculate="undo" if asked == "undo" else "none" if asked is False else "deferred",
        gradients=gradients.get(offload.gradients, "auto"),
        narrow_moments=offload.moments == "bf16",
        bucket_bytes=0 if offload.bucket_mib == "auto" else int(offload.bucket_mib * MIB),
        buffers=BUFFERS if offload.buffers == "auto" else offload.buffers,
        threads=0 if offload.threads == "auto" else offload.threads,
        undo_bytes=0 if offload.undo_gib == "auto" else int(offload.undo_gib * GIB),
    )


def tiers_from(layout: Layout) -> Tiers:
    """Return what a layout says."""
    work = layout.host
    return Tiers(
        optimizer="nvme" if layout.offload_optimizer == "nvme" else "cpu",
        parameters="nvme" if layout.offload_parameters == "nvme" else "cpu",
        speculate=work.speculate,
        gradients=work.gradients,
        narrow_moments=work.moments == "bf16",
        bucket_bytes=work.bucket_bytes,
        buffers=work.buffers,
        threads=work.threads,
        undo_bytes=work.undo_bytes,
    )
