"""The ``hardware`` and ``limits`` sections, and :class:`Devices`, the hardware with every figure decided."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from partool.spec._base import Auto, Section
from partool.spec.measured_rows import MeasuredRows
from partool.spec.numbers import MOST_DEVICES, Bytes, Cores, CoresOrNone, Figure, Ranks, Rate, Share, Speed, Tokens
from partool.spec.patterns import FilePath, MigProfile

Backend = Literal["cpu", "cuda", "rocm"]
Topology = Literal["switch", "mesh", "none"]


class HardwareSpec(Section):
    """Machines: a catalog name with optional figures that replace the catalog's, ``cpu``, or ``auto`` (this machine).

    A device that the catalog lacks needs ``memory_gib``, ``peak_tflops`` and ``memory_gb_per_s``; its other figures
    default to the figures of a PCIe 4 card. Rates are per device and direction unless they say otherwise.
    """

    accelerator: str = "auto"
    """Catalog name (h100-sxm, mi300x, gh200-96, ...), ``cpu``, or ``auto`` for this machine's devices."""
    slice: MigProfile | None = None
    """MIG profile, such as 3g.40gb: each rank trains on one such slice of the accelerator, one slice per node."""
    nodes: Annotated[int, Field(gt=0, le=100_000)] = 1
    """Number of nodes."""
    per_node: Annotated[int, Field(gt=0, le=1024)] | Auto = "auto"
    """Devices per node; for ``cpu`` the number of ranks."""
    fabric: str | None = None
    """Network between nodes: catalog name (ib-ndr, roce-400, efa, slingshot, ethernet-100g, ...)."""
    backend: Literal["cuda", "rocm"] | None = None
    """Backend of a device that the catalog lacks; default cuda."""
    architecture: Annotated[str, Field(pattern=r"^(sm_[0-9]{2,3}|gfx[0-9a-f]{3,4})$")] | None = None
    """Instruction set of a device that the catalog lacks, as compilers call it (sm_90, gfx942); decides its kernels."""
    memory_gib: Figure | None = None
    """Usable memory per device; for ``cpu`` the whole host's memory."""
    peak_tflops: Figure | None = None
    """Dense peak in the spec's precision; figures that are derived from the peak scale with it."""
    achievable_tflops: Figure | None = None
    """Throughput that large matrix products reach in the spec's precision."""
    sustained_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the achievable throughput that the device sustains over a whole step under its power limit."""
    power_w: Figure | None = None
    """Power limit of one device, if lower than the catalog's: products and attention slow down with its 2/3 power."""
    wide_tflops: Figure | None = None
    """With precision: fp8, achievable throughput in 16 bits: products of the head and of attention stay in 16 bits."""
    attention_tflops: Figure | None = None
    """Throughput of fused attention, forward and backward together."""
    units: Cores | None = None
    """Streaming multiprocessors or compute units."""
    memory_gb_per_s: Figure | None = None
    """Bandwidth of a device's memory."""
    topology: Topology | None = None
    """Links between the devices of a node: a switch, one link per pair (mesh), or only PCIe (none)."""
    domain: Ranks | None = None
    """Devices that the fast link joins, if these are not exactly one node."""
    link_gb_per_s: Figure | None = None
    """Rate from one device to all others of its node together."""
    pair_gb_per_s: Figure | None = None
    """Rate between two devices of a node, if less than to all others together."""
    link_latency_us: Figure | None = None
    """Start time of one collective within a node."""
    fabric_gb_per_s: Figure | None = None
    """Rate of one device to other nodes."""
    fabric_latency_us: Figure | None = None
    """Start time of one collective between nodes."""
    host_link_gb_per_s: Figure | None = None
    """Rate between one device and host memory, while all devices of the node use theirs."""
    host_memory_gib: Figure | None = None
    """Memory of a node."""
    host_memory_gb_per_s: Figure | None = None
    """Bandwidth of a node's memory."""
    host_cores: Cores | None = None
    """Cores of a node."""
    nvme_gb_per_s: Figure | None = None
    """Rate of a node's disks under ``parallel.offload.dir``, half of it read and half of it written."""
    storage_gb_per_s: Figure | None = None
    """Rate at which each node writes checkpoints, while all nodes write; default: what ``partool calibrate`` measured,
    or 1."""
    operator_us: Figure | None = None
    """Host time to start one operator (kernel)."""
    price_per_device_hour: Figure | None = None
    """What one device costs for an hour, in any currency; plans then state what the training costs."""
    profile: FilePath | None = None
    """File that ``partool calibrate`` wrote, relative to the spec; default: this machine's file, if there is one."""


class LimitsSpec(Section):
    """Limits on what the plan may use."""

    prefer: Literal["proven", "fastest"] = "proven"
    """``proven``: predicted step times count with what predictions of the mechanisms in use err by; ``fastest``: they
    count alone. Both count the risk that a layout does not fit."""
    memory_headroom: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of device memory kept free."""
    max_devices: Ranks | None = None
    """Use at most this many of the devices."""
    expert_imbalance: float = Field(default=1.1, ge=1.0, le=1e4)
    """Tokens of the busiest rank's experts relative to the mean over the ranks that share them, for which memory and
    time are predicted; an expert's ``capacity`` limits it."""


class Devices(Section):
    """The machines, with the figures that predictions use."""

    accelerator: str
    """Catalog name, or ``cpu``."""
    architecture: str = ""
    """Instruction set that kernels are compiled for (``sm_90``, ``gfx950``); empty for a CPU, or if not known."""
    measured_as: str = ""
    """Catalog name of the device whose measured kernels price this one's, scaled by the ratio of both devices' rates;
    empty if there is none (:mod:`partool.catalog.silicon`)."""
    slice: str = ""
    """MIG profile of the slice that each rank has; empty for a whole device."""
    backend: Backend
    nodes: Ranks
    per_node: Ranks
    """Ranks per node."""
    domain: Annotated[int, Field(ge=0, le=MOST_DEVICES)] = 0
    """Number of ranks that the fast link joins (72 on GB200 NVL72); 0 means the ranks of one node."""
    memory_bytes: Bytes
    """Memory that one rank can use; on ``cpu`` the host's memory divided by its ranks."""
    peak_flops: Speed | None
    """Peak dense FLOP/s of one rank in the plan's precision; None if not known, and then no MFU is reported."""
    achievable_flops: Speed
    """FLOP/s of large matrix products on one rank, in the plan's precision."""
    sustained_share: Share = 1.0
    """Share of ``achievable_flops`` that a device sustains over a whole step, as power limits lower some clocks."""
    product_element_s: Rate | None = None
    """Seconds per element that a matrix product on a CPU reads or writes, beside its FLOPs at ``achievable_flops``;
    None if it was not measured."""
    wide_flops: Speed | None = None
    """With fp8: FLOP/s of 16-bit matrix products in the head and attention; None means ``achievable_flops``."""
    attention_flops: Speed | None = None
    """FLOP/s of fused attention; None means that the cost model assumes a share of the peak."""
    attention_by_length: tuple[tuple[Tokens, Speed], ...] = ()
    """Sequence lengths, in ascending order, with the FLOP/s of fused attention on a CPU at each; empty means
    ``attention_flops`` at every length."""
    units: CoresOrNone = 0
    """Streaming multiprocessors or compute units of a device; 0 for a CPU."""
    memory_bytes_per_s: Speed
    fresh_bytes_per_s: Speed | None = None
    """Bytes per second written to memory that a CPU rank has not used before; None if it was not measured."""
    topology: Topology = "switch"
    """Links between the devices of a node: a switch for all, one link per pair (mesh), or only PCIe (none)."""
    link_bytes_per_s: Speed
    """Bytes per second in one direction over all links together that join a rank to the other ranks of its node."""
    pair_bytes_per_s: Speed | None = None
    """Bytes per second in one direction between two ranks of a node; None means ``link_bytes_per_s``."""
    link_latency_s: Rate = 10e-6
    """Start time of one collective within a node."""
    fabric: str = ""
    """Catalog name of the network between nodes."""
    fabric_bytes_per_s: Speed
    """Bytes per second between one rank and other nodes, in one direction."""
    fabric_latency_s: Rate = 25e-6
    """Start time of one collective between nodes."""
    host_link_bytes_per_s: Speed | None = None
    """Bytes per second one way between a rank's device and host memory; None if device memory is host memory."""
    host_memory_bytes: Bytes | None = None
    """Memory of a node."""
    host_memory_bytes_per_s: Speed = 200e9
    """Bandwidth of a node's memory."""
    host_cores: CoresOrNone = 0
    """Cores of a node; 0 where the number is not known."""
    disk_bytes_per_s: Speed = 5e9
    """Bytes per second of a node's disks, half read and half written. Default: one data-centre SSD on four lanes of
    PCIe 4 (Samsung PM9A3: 6.8 GB/s read, 4.0 written, https://semiconductor.samsung.com/ssd/datacenter-ssd/pm9a3)."""
    storage_bytes_per_s: Speed = 1e9
    """Bytes per second that each node writes to the storage of checkpoints while all nodes write. Default: Meta's
    storage for Llama 3 sustained 2 TB/s for 16,384 devices, which is 1 GB/s per node of eight (arXiv 2407.21783,
    section 3.3.1)."""
    operator_s: Rate = 7e-6
    """Host time to start one operator (kernel)."""
    measured_rows: MeasuredRows | None = None
    """What ``partool calibrate`` timed on this machine, which takes the place of prices at its sizes."""
    threads_per_rank: CoresOrNone = 0
    """Intra-op threads of torch per rank; 0 leaves the number to torch."""

    @property
    def joined(self) -> int:
        """Number of ranks that the fast link joins."""
        return self.domain or self.per_node

    @model_serializer(mode="wrap")
    def _only_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize devices without a slice, or without figures that few have, as before these fields existed."""
        fields: dict[str, Any] = dump(self)
        few = ("slice", "measured_as", "product_element_s", "attention_by_length", "fresh_bytes_per_s", "measured_rows")
        for name in few:
            if not getattr(self, name):
                fields.pop(name, None)
        return fields
