"""The ``hardware`` and ``limits`` sections, and :class:`Devices`, the hardware with nothing left open."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from partool.spec._base import Auto, Section


class HardwareSpec(Section):
    """Machines: a catalog name with optional figures that replace the catalog's, ``cpu``, or ``auto`` (look here)."""

    accelerator: str = "auto"
    """Catalog name (h100-sxm, mi300x, gh200-96, ...), ``cpu``, or ``auto`` for this machine's devices."""
    nodes: PositiveInt = 1
    per_node: PositiveInt | Auto = "auto"
    """Devices per node; for ``cpu`` the number of ranks."""
    fabric: str | None = None
    """Network between nodes: catalog name (ib-ndr, roce-400, efa, slingshot, ethernet-100g, ...)."""
    memory_gib: PositiveFloat | None = None
    """Usable memory per device; for ``cpu`` the whole host's memory."""
    peak_tflops: PositiveFloat | None = None
    """Dense peak of one device in the spec's precision."""
    memory_gb_per_s: PositiveFloat | None = None
    link_gb_per_s: PositiveFloat | None = None
    """One direction, between devices of a node."""
    fabric_gb_per_s: PositiveFloat | None = None
    """One direction, per device, between nodes."""
    host_memory_gib: PositiveFloat | None = None


class LimitsSpec(Section):
    """What the plan may use."""

    memory_headroom: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of device memory kept free."""
    max_devices: PositiveInt | None = None
    """Use at most this many of the devices."""


class Devices(Section):
    """The machines, with the figures the predictions used."""

    accelerator: str
    """Catalog name, or ``cpu``."""
    backend: Literal["cpu", "cuda", "rocm"]
    nodes: int
    per_node: int
    """Ranks per node."""
    memory_bytes: int
    """Usable by one rank; on ``cpu`` the host's memory divided by its ranks."""
    peak_flops: float | None
    """Of one rank, dense, in the plan's precision; None where it is not known (then no MFU is given)."""
    achievable_flops: float
    """What large matrix products reach on one rank."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """One direction, between ranks of a node."""
    fabric_bytes_per_s: float
    """One direction, per rank, between nodes."""
    host_memory_bytes: int | None = None
    threads_per_rank: int = 0
    """Intra-op threads; 0 leaves the choice to the framework."""
