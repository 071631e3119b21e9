"""Lower bounds of the time of one optimizer step, for a hundred thousand layouts at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partool.cost import collective, tensor_shares
from partool.cost.case import FULL, SCHEDULES, SELECTIVE, Column, Layouts, TrainingJob, among
from partool.cost.sequence import shares as sequence_shares
from partool.cost.time import tensor as tensor_time
from partool.cost.time.micro import Micro, micro
from partool.cost.time.offload import OffloadTime, chain, device_share, device_update_s, offload
from partool.cost.time.pipeline import boundary_elements
from partool.cost.time.sync import PassSeconds, RankParameters, Sync, pipeline_wait, sync
from partool.cost.traffic.total import trained_share

_ANY_ORDER = (SCHEDULES.index("zb-v"), SCHEDULES.index("file"))


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
    tensor_s: Column
    """Seconds in which tensor ranks sum partial gradients once a step."""
    extra_s: Column
    """Seconds of a step outside of its micro-batches."""


def step(job: TrainingJob, layouts: Layouts) -> StepParts:
    """Return the costs of the parts of a step; those of parameters and collectives are averages over pipeline ranks."""
    costs = micro(job, layouts)
    pp, m = layouts.pp, layouts.accumulation
    dense, expert = costs.total("dense") / pp, costs.total("expert") / pp
    ring = layouts.ring
    # Where weights are sent around the ring, every rank has the embedding and the head.
    dense = dense + np.where(ring, (1.0 - 1.0 / pp) * (costs.first.dense + costs.last.dense), 0.0)
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
    optimizer = device_update_s(job, owned * layouts.gpu_fraction) + 50e-6
    boundary = boundary_elements(job, layouts) * job.compute_bytes
    stride = layouts.tp * layouts.cp * layouts.dp
    send = np.where(pp > 1, collective.send_s(job, boundary, stride), 0.0)
    tensor = tensor_time.sync_s(job, layouts, costs.total("summed") / pp)
    exposed = np.maximum(shared.gradient_exposed_s + shared.gather_exposed_s, moved.exposed_s)
    state = exposed + shared.slowdown_s + moved.slowdown_s
    extra = state + tensor + optimizer + job.stack.overhead_s
    return StepParts(costs, shared, moved, optimizer, send, owned, passes.backward_s, tensor, extra)


def hidden_share(job: TrainingJob, layouts: Layouts) -> float:
    """Return the least share of one layout's optimizer state that must stay on the device to hide the host's work.

    See :func:`partool.cost.time.offload.device_share`; the columns of ``layouts`` are single numbers.
    """
    found = step(job, layouts)
    whole = chain(job, layouts, found.owned)
    slowest = max(float(part) for part in (whole.down_s, whole.update_s, whole.up_s, whole.disk_s))
    return device_share(float(found.last_s), slowest, float(whole.lag_s))


def owned_elements(job: TrainingJob, layouts: Layouts, dense: Column, expert: Column) -> Column:
    """Return the number of trained parameters in a rank's optimizer shard; experts are sharded over fewer ranks."""
    shards = np.where(layouts.zero > 0, layouts.shards * layouts.cp, 1)
    with_tensor = np.where(layouts.ep > 1, layouts.tp, 1)
    owners = np.maximum(1.0, shards * with_tensor / np.maximum(layouts.ep, 1))
    cut = np.where(layouts.zero > 0, owners, 1.0)
    return trained_share(job.model, job.frozen) * (dense / shards + expert / cut)


def bound_s(job: TrainingJob, layouts: Layouts) -> Column:
    """Return a lower bound of the step time of each layout.

    The busiest rank processes all micro-batches. The last rank also waits until the first micro-batch has reached it,
    and the step ends only after the last gradients have returned (a zero-bubble schedule fills that time with weight
    gradients).
    """
    parts = step(job, layouts)
    costs, m = parts.micro, layouts.accumulation
    total, forward = costs.total("forward_s") + costs.total("backward_s"), costs.total("forward_s")
    stages = layouts.pp * layouts.chunks
    largest, final, ahead = _largest_stage(job, costs, stages, total)
    several = (layouts.chunks > 1) | (layouts.schedule == SCHEDULES.index("file"))
    busiest: Column = np.where(several, total / layouts.pp, largest)
    fill = np.where(layouts.schedule == SCHEDULES.index("zb-h1"), forward - ahead, total - final)
    through: Column = np.where(layouts.chunks > 1, _interleaved_s(job, layouts, costs, total), m * final + fill)
    # In any order, a micro-batch passes all stages twice; only weight gradients need not be waited for.
    path = total - costs.total("weight_s")
    through = np.where(among(layouts.schedule, _ANY_ORDER), path, np.maximum(through, path))
    if job.stage_layers is not None:
        busiest, through = total / layouts.pp, path
    if np.any(layouts.ring):
        # Every rank runs all stages on its own micro-batches; the last stage is not recomputed.
        slowest = np.maximum.reduce([np.asarray(unit.forward_s) for unit in costs.layers.values()])
        again = _last_layers(job, stages) * slowest
        busiest = np.where(layouts.ring, (total - again) / layouts.pp, busiest)
        through = np.where(layouts.ring, _travelling_s(job, layouts, costs), through)
    bound = np.where(layouts.pp > 1, np.maximum(m * busiest, through), m * total)
    bound = bound + pipeline_wait(job, layouts) * m * busiest
    return job.time_scalar * (bound + parts.extra_s)


def _travelling_s(job: TrainingJob, layouts: Layouts, costs: Micro) -> Column:
    """Return a lower bound of the time that weights and gradients take from rank to rank.

    Per round of micro-batches, all gradients go around the ring once. Weights go around twice, or only once for the
    first and for the last stage if both passes of that stage follow each other directly. The owner of a stage does not
    receive the stage's weights.
    """
    pp, stages = layouts.pp, layouts.pp * layouts.chunks
    each = [unit.dense + unit.expert for unit in costs.layers.values()]
    whole = sum(count * size for count, size in zip(costs.counts.values(), each, strict=True))
    fullest = np.maximum.reduce([np.asarray(0.0 * pp + size) for size in each])
    largest = (np.ceil(job.model.layers / stages) + 1) * fullest
    moved = 2 * np.maximum(whole - largest, 0.0) * job.compute_bytes + whole * job.master_bytes
    share = (pp - 2) / np.maximum(pp - 1, 1)
    sent = layouts.accumulation / pp * share * moved
    stride = layouts.tp * layouts.cp * layouts.dp
    return collective.send_s(job, sent, stride) - collective.send_s(job, 0.0, stride)


def _last_layers(job: TrainingJob, stages: Column) -> Column:
    """Return the maximum number of layers that the last stage may have."""
    # The last stage may have one more layer where a heavy embedding leaves the first stage fewer layers.
    return job.stage_layers[-1] if job.stage_layers is not None else np.ceil(job.model.layers / stages) + 1


def _interleaved_s(job: TrainingJob, layouts: Layouts, costs: Micro, total: Column) -> Column:
    """Return a lower bound of the time of schedules with several stages per rank and unsplit backward passes.

    Rank r waits until the first micro-batch has passed the first stage of each rank before rank r, and the ranks before
    rank r finish last; so the makespan is at least the mean rank's work plus half of the longest wait. The last rank's
    time is known where all stages have equally many layers, stages do not fold back to the first rank, and the head
    costs less than a layer; in that case the last rank's full wait counts.
    """
    m, before = layouts.accumulation, layouts.pp - 1
    each = np.min([np.broadcast_to(unit.both_s, np.shape(total)) for unit in costs.layers.values()], axis=0)
    stages = layouts.pp * layouts.chunks
    least = np.floor(job.model.layers / stages) * each
    bound: Column = m * total / layouts.pp + 0.5 * before * least
    if len(costs.layers) > 1:
        return bound
    even = (job.model.layers % stages == 0) & (costs.last.both_s < each) & np.logical_not(layouts.folded)
    exact = m * (layouts.chunks * least + costs.last.both_s) + before * least
    return np.asarray(np.where(even, np.maximum(exact, bound), bound))


def _largest_stage(job: TrainingJob, costs: Micro, stages: Column, total: Column) -> tuple[Column, Column, Column]:
    """Return the seconds of the largest stage's passes, the last stage's passes, and the last stage's forward pass.

    All three times belong to the split of layers whose largest stage is smallest. They are exact where all layers cost
    the same; otherwise they are lower bounds that follow from the mean stage and the head only.
    """
    head, embedding = costs.last.both_s, costs.first.both_s
    if len(costs.layers) > 1:
        return np.maximum(total / stages, head), head, costs.last.forward_s
    unit, layers = next(iter(costs.layers.values())), job.model.layers
    each = unit.both_s
    best: Column = np.full(np.shape(total), np.inf)
    for extra in (0.0, embedding, head):
        # The largest stage is a whole number of layers, perhaps with embedding or head, and takes the mean or more.
        smallest = np.maximum(np.ceil((total / stages - extra) / each - 1e-9), 1.0)
        for more in range(4):
            limit = (smallest + more) * each + extra
            inner = np.floor(limit / each + 1e-9)
            room = np.floor((limit - embedding) / each + 1e-9) + np.floor((limit - head) / each + 1e-9)
            enough = (room + np.maximum(stages - 2, 0) * inner >= layers) & (limit >= head) & (limit >= embedding)
            best = np.minimum(best, np.where(enough & (stages > 1), limit, np.inf))
    best = np.where(np.isfinite(best), best, total / stages)
    others = np.floor((best - embedding) / each + 1e-9) + np.maximum(stages - 2, 0) * np.floor(best / each + 1e-9)
    final = np.maximum(layers - others, 0)
    return best, final * each + head, final * unit.forward_s + costs.last.forward_s


def saved_bytes(job: TrainingJob, layouts: Layouts) -> Column:
    """Return the approximate bytes of activations that a micro-batch saves on a pipeline rank (arXiv 2205.05198)."""
    rows = layouts.micro_batch * sequence_shares.tokens(job, layouts)
    model = job.model
    stream, (queries, _) = model.hidden / tensor_shares.stream(job, layouts), tensor_shares.heads(model, layouts.tp)
    inner = 4.0 * queries * model.head_dim + 8.0 * tensor_shares.width(model.ffn_hidden, tensor_shares.outer(layouts))
    whole = 8.0 * stream + inner / 2
    # Tensors that selective recomputation keeps in blocks that are not compiled stay on the device.
    attention = stream + queries * model.head_dim
    chosen = np.where(layouts.recompute == SELECTIVE, 0.6 * whole, attention)
    kept = np.where(layouts.recompute >= SELECTIVE, np.where(layouts.compiled == 1, chosen, stream), whole)
    kept = np.where(layouts.recompute == FULL, stream, kept)
    kept = layouts.recompute_share * kept + (1.0 - layouts.recompute_share) * whole
    return rows * kept * job.compute_bytes * model.layers / layouts.pp
