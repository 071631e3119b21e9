"""Number of communicators of a rank: the device memory of each is not seen by the framework's allocator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from partool.cost.case import BY_NODE, SCHEDULES, Column, Layouts, Mask, among
from partool.cost.memory.stacks import memory_stack
from partool.cost.sequence.shares import TRADE_GROUPS
from partool.schedule import connected
from partool.spec.experts import Moe
from partool.spec.numbers import MIB
from partool.work.training import TrainingWork

PAIR_BYTES = {"cpu": 0, "cuda": 342 * MIB, "rocm": 400 * MIB}
"""Bytes per communicator of collectives of two ranks: measured with NCCL on H100 (aiconfigurator-core 0.12.0, NVIDIA,
Apache-2.0)."""
COMMUNICATOR_BYTES = {"cpu": 0, "cuda": 392 * MIB, "rocm": 400 * MIB}
"""Bytes per communicator of collectives of more ranks: measured with 4 and 8 ranks (same source). RCCL's bytes are an
assumption."""
WIRE_BYTES = {"cpu": 0, "cuda": 50 * MIB, "rocm": 50 * MIB}
"""Bytes per communicator that only sends from rank to rank: 4 channels (``MOST_BLOCKS`` of the runtime's groups), each
with a buffer of 4 MiB (``NCCL_BUFFSIZE`` in NCCL's user guide), and a fixed part, which is an assumption."""


class Communicators(NamedTuple):
    """Largest numbers of communicators of any rank; every value is a column."""

    collective: Column
    """Groups of more than one rank in which collectives run, the group of the world included."""
    wires: Column
    """Groups that only send messages from rank to rank."""
    pairs: Column = 0
    """Those of ``collective`` that have two ranks."""

    def memory_bytes(self, backend: str) -> Column:
        """Return the device memory of all of them."""
        larger = (self.collective - self.pairs) * COMMUNICATOR_BYTES[backend]
        return larger + self.pairs * PAIR_BYTES[backend] + self.wires * WIRE_BYTES[backend]


def communicators(job: TrainingWork, layouts: Layouts) -> Communicators:
    """Return how many communicators the fullest rank has.

    partool's runtime opens a group for each axis and purpose, and none twice; an axis that is the whole world uses the
    world's group. Of other code bases only the axes are known.
    """
    inner = np.where(among(layouts.sequence_method, TRADE_GROUPS), layouts.sequence_inner, 1)
    if not memory_stack(job.stack.name).counted_groups:
        # With head exchange inside a ring, there are groups for the heads and groups for the rings.
        axes = (layouts.dp * layouts.cp, layouts.tp, layouts.pp, layouts.cp // inner, inner, layouts.expert_ranks)
        return _counted([(ranks > 1, ranks) for ranks in axes], 0)
    world, ring = layouts.world, layouts.ring
    stateless = ring | (np.asarray(layouts.zero) == 0)  # each data-parallel rank has a whole copy of the state
    sharers = np.where(stateless, 1, layouts.shards * layouts.cp)
    copies = np.where(stateless, layouts.dp * layouts.cp, layouts.replicas)
    state: list[Axis] = [(copies, sharers * layouts.tp), (sharers, layouts.tp), (layouts.tp, 1)]
    if job.model.moe is not None:
        state += _of_experts(job.model.moe, layouts, sharers)
    if job.matrices is not None:
        state.append((layouts.dp * layouts.cp * layouts.tp, 1))
    opened = [*_distinct(state, world)]
    both = (layouts.tensor_inner > 1) & (layouts.tensor_inner < layouts.tp)
    opened += [(both, layouts.tensor_inner), (both, layouts.tp // layouts.tensor_inner)]
    split = (inner > 1) & (inner < layouts.cp)
    undivided = (layouts.cp > 1) & np.logical_not(split)
    opened += [
        (split & (layouts.cp > 1), inner),
        (split & (layouts.cp > 1), layouts.cp // inner),
        (undivided, layouts.cp),
    ]
    tied = _ends_apart(job, layouts) & (layouts.pp > 1) & (world > 2) if job.model.tied_embeddings else False
    opened += [(tied, 2), (world > 1, world), *_of_exchange(job, layouts)]
    keys = job.model.heads if job.model.mla else job.model.kv_heads
    opened.append((_some_keys(job, layouts), layouts.tp // layouts.tensor_inner // keys))
    return _counted(opened, np.where(ring, 4, _wires(job, layouts)))


Opened = tuple[Mask, Column]
"""Mask of layouts that open a group, and its number of ranks."""


def _counted(opened: Sequence[Opened], wires: Column) -> Communicators:
    """Return how many groups are opened, and how many of them have two ranks."""
    groups = sum(np.where(mask, 1, 0) for mask, _ in opened)
    return Communicators(groups, wires, sum(np.where(np.equal(ranks, 2) & mask, 1, 0) for mask, ranks in opened))


Axis = tuple[Column, Column]
"""Number of ranks of a group, and the distance of their rank numbers."""


def _distinct(axes: Sequence[Axis], world: Column) -> Iterator[Opened]:
    """Yield the groups of several ranks, but not all, along axes; equal groups are one."""
    for at, (ranks, apart) in enumerate(axes):
        equal = [(ranks == others) & (apart == distance) for others, distance in axes[:at]]
        new = (ranks > 1) & (ranks < world) & ~np.any(np.array(np.broadcast_arrays(False, *equal)), axis=0)
        yield new, ranks


def _of_experts(moe: Moe, layouts: Layouts, sharers: Column) -> Iterator[Axis]:
    """Yield the groups of ranks with the same experts, and of ranks whose tokens are counted together.

    The group in which tokens travel is counted elsewhere. Tensor ranks that have parts of all experts count the same
    tokens, so each of them counts with the ranks of its own place.
    """
    tp, ep, cp = layouts.tp, layouts.expert_ranks, layouts.cp
    yield np.where(ep > 1, sharers * tp // ep, 1), ep
    counting_ranks = np.where(ep > 1, tp, 1)
    stride = np.where(ep > 1, 1, tp)
    if moe.capacity is not None or (moe.aux_loss and moe.aux_scope != "global_batch"):
        yield cp * counting_ranks, stride
    yield layouts.dp * cp * counting_ranks, stride


def _of_exchange(job: TrainingWork, layouts: Layouts) -> Iterator[Opened]:
    """Yield the groups in which tokens travel: of all ranks that share experts, or of rails and of nodes."""
    by_node = among(layouts.expert_exchange, BY_NODE)
    yield np.logical_and(layouts.ep > 1, np.logical_not(by_node)), layouts.expert_ranks
    yield by_node, layouts.expert_ranks // job.domain
    yield by_node, job.domain


def _some_keys(job: TrainingWork, layouts: Layouts) -> Mask:
    """Return True where several tensor ranks, but not all, hold the same key head."""
    keys = job.model.heads if job.model.mla else job.model.kv_heads
    outer = layouts.tp // layouts.tensor_inner
    shared: Mask = outer > keys
    return shared if 1 < keys < job.model.heads else False


def _ends_apart(job: TrainingWork, layouts: Layouts) -> Mask:
    """Return True where the first and the last stage are on different ranks and exchange activations."""
    apart: Mask = ~np.asarray(layouts.folded | layouts.ring, dtype=bool)
    if job.lists is None:
        return apart
    placement = job.lists.placement
    differ: Mask = np.where(layouts.schedule == SCHEDULES.index("file"), placement[0] != placement[-1], apart)
    return differ


def _wires(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the most wires of a rank: one to and one from each rank that holds a stage next to one of its own."""
    wires = 2 * np.minimum(layouts.pp - 1, 2)
    if job.lists is None or job.lists.moves != "activations":
        return wires
    pairs = connected(job.lists.placement)
    most = max(sum(rank in pair for pair in pairs) for rank in range(job.lists.ranks))
    return np.where(layouts.schedule == SCHEDULES.index("file"), most, wires)
