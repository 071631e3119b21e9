"""Costs of the parts of one optimizer step, for one layout or a hundred thousand at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partool.cost import collective, tensor_shares
from partool.cost.case import FULL, SELECTIVE, Column, Layouts
from partool.cost.sequence import shares as sequence_shares
from partool.cost.time.pipeline import boundary_elements
from partool.cost.training.micro import Micro, micro
from partool.cost.training.offload import OffloadTime, offload
from partool.cost.training.optimizer import update_s
from partool.cost.training.sync import PassSeconds, RankParameters, Sync, sync
from partool.cost.training.traffic import trained_share
from partool.work.training import TrainingWork


@dataclass(frozen=True)
class StepParts:
    """Costs of the parts of a step, averaged over each layout's pipeline ranks, without waits due to the schedule."""

    micro: Micro
    sync: Sync
    offload: OffloadTime
    optimizer_s: Column
    send_s: Column
    """Seconds of one transfer between neighbouring stages."""
    owned: Column
    """Number of parameters that a rank's optimizer updates."""
    last_s: Column
    """Seconds of the last backward pass."""


def step(job: TrainingWork, layouts: Layouts) -> StepParts:
    """Return the costs of the parts of a step; those of parameters and collectives are averages over pipeline ranks."""
    costs = micro(job, layouts)
    pp, m = layouts.pp, layouts.accumulation
    dense, expert = held_elements(job, layouts, costs)
    passes = PassSeconds(costs.total("forward_s") / pp, costs.total("backward_s") / pp)
    groups = np.maximum((job.model.layers + 2) / pp, 1.0)
    shared = sync(job, layouts, RankParameters(dense, expert, groups), passes)
    owned = owned_elements(job, layouts, dense, expert)
    moved = offload(
        job,
        layouts,
        owned,
        saved_bytes=saved_bytes(job, layouts),
        passes_s=m * passes.both_s,
        last_s=passes.backward_s,
    )
    optimizer = update_s(job, layouts, owned * layouts.gpu_fraction)
    return StepParts(costs, shared, moved, optimizer, neighbour_s(job, layouts), owned, passes.backward_s)


def neighbour_s(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the seconds of one transfer of a micro-batch between neighbouring stages; 0 without pipeline ranks."""
    boundary = boundary_elements(job, layouts) * job.compute_bytes
    stride = layouts.tp * layouts.cp * layouts.dp
    return np.where(layouts.pp > 1, collective.send_s(job, boundary, stride), 0.0)


def held_elements(job: TrainingWork, layouts: Layouts, costs: Micro) -> tuple[Column, Column]:
    """Return the mean numbers of a pipeline rank's parameters outside and inside experts."""
    pp = layouts.pp
    dense, expert = costs.total("dense") / pp, costs.total("expert") / pp
    # Where weights are sent around the ring, every rank has the embedding and the head.
    return dense + np.where(layouts.ring, (1.0 - 1.0 / pp) * (costs.first.dense + costs.last.dense), 0.0), expert


def owned_elements(job: TrainingWork, layouts: Layouts, dense: Column, expert: Column) -> Column:
    """Return the number of trained parameters in a rank's optimizer shard; experts are sharded over fewer ranks."""
    shards = np.where(layouts.zero > 0, layouts.shards * layouts.cp, 1)
    with_tensor = np.where(layouts.ep > 1, layouts.tp, 1)
    owners = np.maximum(1.0, shards * with_tensor / np.maximum(layouts.expert_ranks, 1))
    cut = np.where(layouts.zero > 0, owners, 1.0)
    return trained_share(job.model, job.frozen, job.few_bits) * (dense / shards + expert / cut)


def saved_bytes(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the approximate bytes of activations that a micro-batch saves on a pipeline rank (arXiv 2205.05198)."""
    rows = layouts.micro_batch * sequence_shares.tokens(job, layouts)
    model = job.model
    stream, (queries, _) = model.hidden / tensor_shares.stream(job, layouts), tensor_shares.heads(model, layouts.tp)
    inner = 4.0 * queries * model.head_dim + 8.0 * tensor_shares.width(model.ffn_hidden, tensor_shares.outer(layouts))
    all_saved = 8.0 * stream + inner / 2
    # Tensors that selective recomputation keeps in blocks that are not compiled stay on the device.
    attention = stream + queries * model.head_dim
    chosen = np.where(layouts.recompute == SELECTIVE, 0.6 * all_saved, attention)
    kept = np.where(layouts.recompute >= SELECTIVE, np.where(layouts.compiled == 1, chosen, stream), all_saved)
    kept = np.where(layouts.recompute == FULL, stream, kept)
    kept = layouts.recompute_share * kept + (1.0 - layouts.recompute_share) * all_saved
    return rows * kept * job.compute_bytes * model.layers / layouts.pp
