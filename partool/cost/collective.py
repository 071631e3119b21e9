"""Seconds of collectives over two tiers: the link inside a node (or rack), and the network between nodes.

The equation is ``latency + g (n-1)/n bytes / rate``: rings and their hierarchical forms move (n-1)/n of the tensor once
in an all-gather or reduce-scatter (g = 1) and twice in an all-reduce (g = 2; Thakur, Rabenseifner and Gropp, IJHPCA
2005). A ring that crosses nodes enters and leaves each node once; its rate is bounded by the network adapters of all
members in a node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partool.cost.case import Column, Layouts
from partool.work.base import Workload

_LINK_SHARE = {"cpu": 1.0, "cuda": 0.78, "rocm": 0.70}
"""Ratio of the bus bandwidth of large collectives to the link's line rate: 230 of 300 GB/s on A100, 365 of 450 GB/s on
H100. With RCCL the ratio is 0.70 (AMD Primus' projection defaults)."""
_FABRIC_SHARE = {"cpu": 0.8, "cuda": 0.85, "rocm": 0.75}
_HOP = 0.4
"""Ratio of the time of one hop in a ring to the time that a collective takes to start. NCCL's tuning table has 3.4 us
per NVLink hop."""
_REDUCE_SLOWDOWN = {"cpu": 1.7, "cuda": 1.0, "rocm": 1.0}
"""Ratio of the time of reductions to the time of gathers of the same bytes. Gloo sums on the core that also sends, and
its reduce-scatter is an all-reduce of which each rank keeps a part (measured ratio: 1.7 to 1.9)."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks of one collective, described by the number of ranks and the number of ranks that share a fast domain."""

    size: Column
    inside: Column
    """Number of members per node or rack-scale domain (at least 1)."""

    @property
    def domains(self) -> Column:
        """Number of nodes (or domains) that the group spans."""
        return np.ceil(self.size / self.inside)


def group(job: Workload, size: Column, stride: Column) -> RankGroup:
    """Return the group of ``size`` ranks whose rank numbers are ``stride`` apart."""
    return RankGroup(size, np.maximum(1, np.minimum(size, job.domain // np.maximum(stride, 1))))


def axis_group(job: Workload, layouts: Layouts, axis: str) -> RankGroup:
    """Return the group along ``axis``: a mesh axis, or ``ep``, the ranks that share experts."""
    tp, cp = layouts.tp, layouts.cp
    if axis == "tp":
        return group(job, tp, 1)
    if axis == "cp":
        return group(job, cp, tp)
    if axis == "ep":
        return group(job, layouts.expert_ranks, 1 if job.stack.folded_experts else tp)
    if axis == "shards":
        return group(job, layouts.shards * cp, tp)
    if axis == "replicas":
        return group(job, layouts.replicas, tp * cp * layouts.shards)
    return group(job, layouts.pp, tp * cp * layouts.dp)


def rate(job: Workload, ranks: RankGroup) -> Column:
    """Return the bytes per second of a ring over a group; the slowest tier that the ring crosses sets this rate."""
    devices = job.devices
    inside = inside_rate(job, ranks.inside)
    network = _FABRIC_SHARE[devices.backend] * devices.fabric_bytes_per_s * ranks.inside
    within = np.where(ranks.inside > 1, inside, np.inf)
    return np.where(ranks.domains > 1, np.minimum(within, network), inside)


def inside_rate(job: Workload, members: Column) -> Column:
    """Return the bytes per second of a ring over ``members`` devices of a node.

    In a node whose devices are linked pairwise, the ring uses only the links between these devices.
    """
    devices = job.devices
    pair = devices.pair_bytes_per_s or devices.link_bytes_per_s
    ring_bytes_per_s = pair * np.maximum(members - 1, 1) if devices.topology == "mesh" else devices.link_bytes_per_s
    return _LINK_SHARE[devices.backend] * np.minimum(ring_bytes_per_s, devices.link_bytes_per_s)


def latency(job: Workload, ranks: RankGroup) -> Column:
    """Return the latency of a collective in seconds, which is the time to start it plus the time of all hops.

    Hops are inside nodes and between nodes. A ring of 8 A100 takes about 65 us to all-reduce zero bytes. Between nodes
    collectives use trees, so the latency grows with the logarithm of the number of nodes.
    """
    devices = job.devices
    inside = devices.link_latency_s * (1.0 + _HOP * (ranks.inside - 1))
    between = devices.fabric_latency_s * np.log2(np.maximum(ranks.domains, 1.0) + 1.0)
    return inside + np.where(ranks.domains > 1, between, 0.0)


def ring_latency(job: Workload, ranks: RankGroup) -> Column:
    """Return the latency in seconds of a gather or scatter that goes hop by hop around all ranks."""
    devices = job.devices
    inside = _HOP * devices.link_latency_s * (ranks.size - ranks.domains)
    between = _HOP * devices.fabric_latency_s * np.maximum(ranks.domains - 1.0, 0.0)
    return devices.link_latency_s + inside + between


def gather_s(job: Workload, whole_bytes: Column, ranks: RankGroup) -> Column:
    """Return the seconds of an all-gather or reduce-scatter whose full tensor has ``whole_bytes``; 0 for one rank."""
    moved = whole_bytes * (ranks.size - 1) / ranks.size / rate(job, ranks)
    return np.where(ranks.size > 1, ring_latency(job, ranks) + moved, 0.0)


def reduce_scatter_s(job: Workload, whole_bytes: Column, ranks: RankGroup) -> Column:
    """Return the seconds of a reduce-scatter whose full tensor has ``whole_bytes``; 0 for one rank."""
    moved = whole_bytes * (ranks.size - 1) / ranks.size / rate(job, ranks) * _REDUCE_SLOWDOWN[job.devices.backend]
    return np.where(ranks.size > 1, ring_latency(job, ranks) + moved, 0.0)


def all_reduce_s(job: Workload, whole_bytes: Column, ranks: RankGroup) -> Column:
    """Return the seconds of an all-reduce of ``whole_bytes``; 0 for one rank."""
    slow = 1.0 + _REDUCE_SLOWDOWN[job.devices.backend]
    moved = slow * whole_bytes * (ranks.size - 1) / ranks.size / rate(job, ranks)
    return np.where(ranks.size > 1, 2.0 * latency(job, ranks) + moved, 0.0)


def all_to_all_s(job: Workload, sent_bytes: Column, ranks: RankGroup, between: Column = 1.0) -> Column:
    """Return the seconds of an all-to-all in which each rank holds ``sent_bytes`` for all members together.

    Bytes for other nodes go through the rank's network adapter; ``between`` is the share of these bytes that remains if
    a node receives only one copy of each token. At the same time, all other bytes go over the links inside the node.
    """
    devices = job.devices
    inside = sent_bytes * (ranks.inside - 1) / ranks.size / inside_rate(job, ranks.inside)
    network = _FABRIC_SHARE[devices.backend] * devices.fabric_bytes_per_s
    across = between * sent_bytes * (ranks.size - ranks.inside) / ranks.size / network
    return np.where(ranks.size > 1, latency(job, ranks) + np.maximum(inside, across), 0.0)


def send_s(job: Workload, sent_bytes: Column, stride: Column) -> Column:
    """Return the seconds of one transfer between two ranks whose numbers differ by ``stride``.

    Inside a node the transfer uses the link between the two devices, else the network.
    """
    devices = job.devices
    backend = devices.backend
    pair = _LINK_SHARE[backend] * (devices.pair_bytes_per_s or devices.link_bytes_per_s)
    network = _FABRIC_SHARE[backend] * devices.fabric_bytes_per_s
    near = stride < job.domain
    return np.where(near, devices.link_latency_s, devices.fabric_latency_s) + sent_bytes / np.where(near, pair, network)
