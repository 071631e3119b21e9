"""Seconds of collectives over two tiers: the link inside a node (or rack), and the network between nodes.

Inside a node, measured tables give the seconds (:mod:`partool.cost.silicon.collectives`). Devices without a table take
``latency + g (n-1)/n bytes / rate``: rings move (n-1)/n of the tensor once in an all-gather or reduce-scatter (g = 1)
and twice in an all-reduce (g = 2; Thakur, Rabenseifner and Gropp, IJHPCA 2005).

A collective that crosses nodes does the same work inside each node and sends over the network at the same time, after a
start: that of a collective inside a node, also where each node has one rank, and what the network adds to it. The
latter grows with the number of hops (a ring of gathers) or with its logarithm (trees of all-reduces) and with the
message, as small messages go by the protocol of low latency and larger ones by that of high bandwidth. The part of the
shorter of both phases that is not hidden is that of the first pieces. The few figures are NCCL's
(https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc) and those of published nccl-tests lines, with which
tests compare the model (tests/data/silicon/nccl_tests.csv).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from partool.catalog.silicon.collectives import Operation
from partool.cost.case import Column, Layouts
from partool.cost.silicon import collectives as measured
from partool.spec.hardware import Devices
from partool.spec.measured_rows import CollectiveRow
from partool.work.base import Workload

_LINK_SHARE = {"cpu": 1.0, "cuda": 0.78, "rocm": 0.70}
"""Ratio of the bus bandwidth of large collectives to the link's line rate, for devices without a table: 230 of 300 GB/s
on A100, 365 of 450 GB/s on H100. With RCCL the ratio is 0.70 (AMD Primus' projection defaults)."""
_FABRIC_SHARE = {"cpu": 0.8, "cuda": 0.85, "rocm": 0.85}
"""Ratio of the rate of large collectives to that of the network adapters. Published lines of idle clusters have 0.77 to
0.96; on networks that other jobs use, less remains."""
_HOP = 0.4
"""Ratio of the time of one hop in a ring to the time that a collective takes to start. NCCL's tuning table has 3.4 us
per NVLink hop."""
_QUICK_HOP = 0.1
"""The same ratio inside a node for the protocol of low latency: tables of H100 have 0.8 us per rank."""
_MORE_START_S = 37.5e-6
"""What the protocol of high bandwidth adds to the start of an all-reduce, per doubling of the nodes, fitted to lines of
two to eight nodes of H100 and B200 with InfiniBand (87 lines of NVIDIA/nccl-tests issue 309, 22 of Nebius, 19 of
Lambda). It is the protocol's, not the network's: 43 lines of EFA, whose small messages start later, are met with the
same figure (median error 13 %; 24 % in proportion to the network's start)."""
_QUICK_BYTES_PER_S = {"cpu": np.inf, "cuda": 16e9, "rocm": 16e9}
"""Rate of the protocol of low latency between nodes, fitted to the same lines. NCCL's tuning table has 35 to 45 GB/s of
bus bandwidth on Hopper, which is half as much of the tensor in an all-reduce."""
_FIRST_PIECES_S = 60e-6
"""Longest part of the shorter phase, inside nodes or between them, that the longer one does not hide, fitted to the 276
published lines of nodes of eight NVIDIA devices: the mean over publishers of their median errors is 12.0 % where all is
hidden, 10.4 % with 30 us, 10.5 % with 60 us, 11.1 % with 120 us and 38 % where nothing is. With one publisher left out
at a time, the others give 30 us, and once 0."""
_RACK_ADAPTERS = 8
"""Network adapters of a rack-scale domain that one collective drives: two racks of GB200 all-reduce 408 GB/s, twenty
203 GB/s, which is 8 adapters of 50 GB/s once and twice (https://github.com/coreweave/nccl-tests#2-racks)."""
_REDUCE_SLOWDOWN = {"cpu": 1.7, "cuda": 1.0, "rocm": 1.0}
"""Ratio of the time of reductions to the time of gathers of the same bytes. Gloo sums on the core that also sends, and
its reduce-scatter is an all-reduce of which each rank keeps a part (measured ratio: 1.7 to 1.9)."""
_ONCE_START_S, _ONCE_NODE_START_S = 75e-6, 65e-6
"""Start of a dispatch and a combine of kernels that send a token once, and what each doubling of the nodes adds to it:
DeepEP's smallest exchanges in tables of H100 take 74, 142, 213 and 260 us on 1, 2, 4 and 8 nodes. They matter for few
tokens only: starts of 45 to 110 us change the errors of 147 exchanges of 1,024 tokens and more by 1 % of the time, and
30 to 100 us per doubling by 1 %, with any number of nodes left out."""
_ONCE_TOKEN_BYTES_PER_S, _ONCE_COPY_SHARE = 200e9, 1.2
"""Rate at which 24 units take up tokens, and ratio of the rate at which they write copies to the link's rate. A token's
copy for a rank of its own is among the copies and does not use the link. Both are fitted to DeepEP's tables of one node
of H100, B200 and GB200."""
_ONCE_FABRIC_SHARE = {"two": 0.73, "more": 0.90}
"""Share of an adapter's rate that they reach between two nodes, and between more (fitted to the same tables)."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks of one collective, described by the number of ranks and the number of ranks that share a fast domain."""

    size: Column
    inside: Column
    """Number of members per node or rack-scale domain (at least 1)."""
    slots: Column
    """Number of neighbouring devices of a node whose links the collective uses: the members, or on PCIe, where devices
    have no links of their own, all devices from the first member to the last. Groups side by side share them."""

    @property
    def domains(self) -> Column:
        """Number of nodes (or domains) that the group spans."""
        return np.ceil(self.size / self.inside)


def group(job: Workload, size: Column, stride: Column) -> RankGroup:
    """Return the group of ``size`` ranks whose rank numbers are ``stride`` apart."""
    stride = np.maximum(stride, 1)
    inside = np.maximum(1, np.minimum(size, job.domain // stride))
    slots = np.where(inside > 1, inside * stride, 1) if job.devices.topology == "none" else inside
    return RankGroup(size, inside, slots)


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
    """Return the bytes per second at which a group's ring crosses the network; infinite within one node."""
    devices = job.devices
    adapters = np.minimum(ranks.inside, _RACK_ADAPTERS) if job.domain > devices.per_node else ranks.inside
    network = _FABRIC_SHARE[devices.backend] * devices.fabric_bytes_per_s * adapters
    return np.where(ranks.domains > 1, network, np.inf)


class _Link(NamedTuple):
    """What the equation of a node's collectives reads."""

    backend: str
    mesh: bool
    bytes_per_s: float
    pair_bytes_per_s: float
    latency_s: float


def _link(devices: Devices) -> _Link:
    pair_bytes_per_s = devices.pair_bytes_per_s or devices.link_bytes_per_s
    mesh = devices.topology == "mesh"
    return _Link(devices.backend, mesh, devices.link_bytes_per_s, pair_bytes_per_s, devices.link_latency_s)


def _ring_bytes_per_s(link: _Link, members: Column) -> Column:
    """Return the bytes per second of a ring over ``members`` devices of a node that no table prices.

    In a node whose devices are linked pairwise, the ring uses only the links between these devices.
    """
    ring_bytes_per_s = link.pair_bytes_per_s * np.maximum(members - 1, 1) if link.mesh else link.bytes_per_s
    return _LINK_SHARE[link.backend] * np.minimum(ring_bytes_per_s, link.bytes_per_s)


def _equation_s(link: _Link, operation: Operation, whole_bytes: Column, members: Column) -> Column:
    """Return the seconds of a collective of several ranks of a node that no table prices."""
    sums, reduced = operation == "all_reduce", _REDUCE_SLOWDOWN[link.backend]
    passes = 1.0 + reduced if sums else reduced if operation == "reduce_scatter" else 1.0
    start = link.latency_s * (1.0 + _HOP * (members - 1)) * (2.0 if sums else 1.0)
    return start + passes * whole_bytes * (members - 1) / members / _ring_bytes_per_s(link, members)


@lru_cache(maxsize=64)
def _row_curves(
    link: _Link, operation: Operation, most: int, rows: tuple[CollectiveRow, ...]
) -> measured.CollectiveCurves:
    return measured.equation_curves(partial(_equation_s, link, operation), most, rows)


def inside_s(
    job: Workload, operation: Operation, whole_bytes: Column, ranks: RankGroup, at_least: Column | None = None
) -> Column:
    """Return the seconds of a collective of a group's ranks in one node; 0 for one rank.

    With ``at_least``, the result is a lower bound for messages of at least so many bytes, and convex in the bytes.
    """
    devices = job.devices
    seconds = measured.seconds(devices, operation, whole_bytes, ranks.slots, at_least)
    if seconds is not None:
        return seconds
    members, rows = ranks.inside, measured.rows(devices, operation)
    if rows:
        curves = _row_curves(_link(devices), operation, measured.most_ranks(devices), rows)
        return curves.seconds_of(whole_bytes, members, at_least)
    return np.where(np.asarray(members) > 1, _equation_s(_link(devices), operation, whole_bytes, members), 0.0)


def gather_s(
    job: Workload,
    whole_bytes: Column,
    ranks: RankGroup,
    at_least: Column | None = None,
    operation: Operation = "all_gather",
) -> Column:
    """Return the seconds of an all-gather whose full tensor has ``whole_bytes``; 0 for one rank.

    ``at_least`` is that of :func:`inside_s`. ``operation`` is ``reduce_scatter`` for :func:`reduce_scatter_s`.
    """
    if np.all(ranks.size <= 1):
        return 0.0
    within = inside_s(job, operation, whole_bytes, ranks, at_least)
    if np.all(ranks.domains <= 1):
        return within
    devices = job.devices
    slow = _REDUCE_SLOWDOWN[devices.backend] if operation == "reduce_scatter" else 1.0
    network = slow * whole_bytes * (ranks.size - 1) / ranks.size / rate(job, ranks)
    # A ring goes through all ranks of all nodes; the table has the hops of one node.
    hops = ranks.size - ranks.domains - np.maximum(ranks.inside - 1, 0)
    quick = _QUICK_HOP * devices.link_latency_s * hops + _HOP * devices.fabric_latency_s * (ranks.domains - 1)
    more = (_HOP - _QUICK_HOP) * devices.link_latency_s * hops + _MORE_START_S
    start = np.where(ranks.domains > 1, quick, 0.0) + _lone_start_s(job, ranks)
    return start + _across(job, whole_bytes, at_least, (within, network), np.where(ranks.domains > 1, more, 0.0))


def reduce_scatter_s(job: Workload, whole_bytes: Column, ranks: RankGroup) -> Column:
    """Return the seconds of a reduce-scatter whose full tensor has ``whole_bytes``; 0 for one rank."""
    return gather_s(job, whole_bytes, ranks, operation="reduce_scatter")


def scatter_s(job: Workload, whole_bytes: Column, ranks: RankGroup, at_least: Column | None = None) -> Column:
    """Return the seconds of a reduce-scatter that sends each part once, also on CPUs; 0 for one rank."""
    on_cpu = job.devices.backend == "cpu"
    return gather_s(job, whole_bytes, ranks, at_least, "all_gather" if on_cpu else "reduce_scatter")


def all_reduce_s(job: Workload, whole_bytes: Column, ranks: RankGroup, at_least: Column | None = None) -> Column:
    """Return the seconds of an all-reduce of ``whole_bytes``; 0 for one rank. ``at_least``: see :func:`inside_s`."""
    if np.all(ranks.size <= 1):
        return 0.0
    within = inside_s(job, "all_reduce", whole_bytes, ranks, at_least)
    if np.all(ranks.domains <= 1):
        return within
    devices = job.devices
    slow = 1.0 + _REDUCE_SLOWDOWN[devices.backend]
    share = slow * (ranks.size - 1) / ranks.size
    if devices.backend == "cuda":
        # Between two nodes a tree sends each sum once in each direction.
        share = np.where(ranks.domains == 2, 1.0, share)
    network = share * whole_bytes / rate(job, ranks)
    doublings = np.log2(np.maximum(ranks.domains, 1.0))
    start, more = _HOP * devices.fabric_latency_s * doublings, _MORE_START_S * doublings
    if devices.backend == "cpu":
        # Gloo has no protocol of low latency: each hop takes as long as a message.
        start = 2.0 * devices.fabric_latency_s * np.log2(ranks.domains + 1.0) * (ranks.domains > 1)
    start = start + _lone_start_s(job, ranks)
    return start + _across(job, whole_bytes, at_least, (within, network), more)


def _lone_start_s(job: Workload, ranks: RankGroup) -> Column:
    """Return the start of a collective whose ranks are one per node, and so have no seconds inside of a node.

    NCCL starts the same kernel whatever links the ranks have.
    """
    return np.where((ranks.domains > 1) & (np.asarray(ranks.inside) <= 1), job.devices.link_latency_s, 0.0)


def _across(
    job: Workload, whole_bytes: Column, at_least: Column | None, phases: tuple[Column, Column], more: Column
) -> Column:
    """Return the seconds of both phases of a collective that crosses nodes, inside nodes and between them.

    ``more`` is what the protocol of high bandwidth adds to the start. Where ``at_least`` is given, terms that are not
    convex in the bytes are those of the smallest message.
    """
    within, network = phases
    shorter = np.minimum(within, network)
    sent = whole_bytes
    if at_least is not None:
        sent = np.minimum(at_least, whole_bytes)
        shorter = shorter * np.minimum(sent / np.maximum(whole_bytes, 1e-30), 1.0)
    switched = np.minimum(sent / _QUICK_BYTES_PER_S[job.devices.backend], more)
    return switched + np.maximum(within, network) + np.minimum(shorter, _FIRST_PIECES_S)


def all_to_all_s(job: Workload, sent_bytes: Column, ranks: RankGroup, at_least: Column | None = None) -> Column:
    """Return the seconds of an all-to-all in which each rank holds ``sent_bytes`` for all members together.

    Bytes for other nodes go through the rank's network adapter. At the same time, all other bytes go over the links
    inside the node. ``at_least``: see :func:`inside_s`.
    """
    devices = job.devices
    own_share = ranks.inside / ranks.size
    least = None if at_least is None else at_least * own_share
    within = inside_s(job, "all_to_all", sent_bytes * own_share, ranks, least)
    if np.all(ranks.domains <= 1):
        return within
    network = _FABRIC_SHARE[devices.backend] * devices.fabric_bytes_per_s
    across = sent_bytes * (1.0 - own_share) / network
    start = devices.fabric_latency_s * np.log2(np.maximum(ranks.domains, 1.0) + 1.0)
    start = np.where(ranks.domains > 1, start, 0.0) + _lone_start_s(job, ranks)
    return start + np.maximum(within, across)


def token_exchange_s(job: Workload, token_bytes: Column, ranks: RankGroup, visits: Column) -> Column:
    """Return the seconds of a dispatch and a combine by kernels that send a token once; 0 for one rank.

    A rank sends ``token_bytes`` of tokens, each of which has ``visits`` experts: once to each node with one of them,
    however many are there, and from there once to each rank. The numbers of nodes and ranks are the expected ones of
    experts chosen at random. Both directions take 16-bit tokens; the tables' dispatch is in eight bits, of half the
    bytes.
    """
    devices = job.devices
    size, nodes = np.maximum(ranks.size, 1.0), np.maximum(ranks.domains, 1.0)
    ranks_of_token = size * (1.0 - (1.0 - 1.0 / size) ** visits)
    nodes_of_token = nodes * (1.0 - (1.0 - 1.0 / nodes) ** visits)
    each = 1.0 / _ONCE_TOKEN_BYTES_PER_S + ranks_of_token / (_ONCE_COPY_SHARE * devices.link_bytes_per_s)
    within = np.where(ranks.inside > 1, token_bytes * each, 0.0)
    share = np.where(nodes > 2, _ONCE_FABRIC_SHARE["more"], _ONCE_FABRIC_SHARE["two"])
    across = token_bytes * nodes_of_token * (nodes - 1) / nodes / (share * devices.fabric_bytes_per_s)
    start = _ONCE_START_S + _ONCE_NODE_START_S * np.log2(nodes)
    return np.where(ranks.size > 1, start + 2.0 * np.maximum(within, across), 0.0)


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
