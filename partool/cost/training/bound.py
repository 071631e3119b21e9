"""Lower bounds of the time of one optimizer step, for a hundred thousand layouts at once.

Each bound holds for the exact prediction of every layout, whatever the split of layers over stages. A term that differs
between pipeline ranks is replaced by its mean over the ranks where it is convex in what the ranks hold, as the slowest
rank takes the mean or more; where it is not convex, a smaller convex term replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partool.cost import collective
from partool.cost.case import CAPPED, HALVED, SCHEDULES, Column, Layouts, Mask, among
from partool.cost.training.crowd import crowds
from partool.cost.training.micro import Micro, cases
from partool.cost.training.offload import offload
from partool.cost.training.optimizer import update_s
from partool.cost.training.passes import PassLimits, passes, recorded, shared_most
from partool.cost.training.split import Split, split
from partool.cost.training.step import held_elements, neighbour_s, owned_elements, saved_bytes
from partool.cost.training.sync import LeastElements, PassSeconds, RankParameters, pipeline_wait, sync, tensor_sync_s
from partool.work.training import TrainingWork

_ANY_ORDER = (SCHEDULES.index("zb-v"), SCHEDULES.index("file"))
_GPIPE, _1F1B, _INTERLEAVED = (SCHEDULES.index(name) for name in ("gpipe", "1f1b", "interleaved"))
_FOLLOWED = 200_000
"""Number of actions up to which exact predictions follow a schedule (:mod:`partool.schedule.makespan`)."""
_SEARCHED = 20_000
"""The same number for schedules whose action lists a search finds."""
_ANY = 1e30
"""Number of elements that is larger than any message."""


@dataclass(frozen=True)
class Open:
    """Choices that a bound leaves open: it holds whatever is offloaded."""

    updated: float = 1.0
    """Share of the optimizer's state that is updated on the device, or on the host in no less time."""
    recompute: bool = False
    """True if the bound also holds for recompute policies that take longer than that of the layouts."""


def bound_s(job: TrainingWork, layouts: Layouts, open_choices: Open | None = None) -> Column:
    """Return a lower bound of the step time of each layout.

    The busiest rank processes all micro-batches. The last rank also waits until the first micro-batch has reached it,
    and the step ends only after the last gradients have returned (a zero-bubble schedule fills that time with weight
    gradients). ``open_choices`` names choices that the bound leaves open.
    """
    pass_limits = passes(job, layouts)
    m, pp, total = layouts.accumulation, layouts.pp, pass_limits.both_s
    busiest, through = _pipelined(job, layouts, pass_limits)
    through = np.where(_extrapolated(layouts), 0.0, through)
    bound = np.where(pp > 1, np.maximum(m * busiest, through), m * total)
    bound = bound + pipeline_wait(job, layouts) * m * busiest
    return job.time_scalar * (bound + _outside_s(job, layouts, pass_limits, open_choices))


def pass_bound_s(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the seconds of the passes of each layout's busiest pipeline rank, or less; layouts have columns.

    The mean rank's passes take no longer. They are computed once for layouts that differ in nothing that passes read.
    """
    first, where = cases(job, layouts)
    mean_s = passes(job, layouts.take(first)).both_s / layouts.take(first).pp
    # Around a ring of weights the last stage is not recomputed.
    return np.asarray(np.where(layouts.ring, 0.0, job.time_scalar * layouts.accumulation * np.asarray(mean_s)[where]))


def _pipelined(job: TrainingWork, layouts: Layouts, pass_limits: PassLimits) -> tuple[Column, Column]:
    """Return the least seconds of the busiest pipeline rank per micro-batch, and of a whole step's passes."""
    costs, m, total = pass_limits.costs, layouts.accumulation, pass_limits.both_s
    if job.stage_layers is not None and not np.any(layouts.ring):
        return total / layouts.pp, pass_limits.path_s
    limits = split(job, layouts, pass_limits)
    several = (layouts.chunks > 1) | (layouts.schedule == SCHEDULES.index("file"))
    busiest: Column = np.where(several, total / layouts.pp, limits.largest_s)
    # The last stage's passes follow each other; before and after them a micro-batch goes through all other stages.
    final, ahead = limits.final_s, limits.final_forward_s
    fill = np.where(layouts.schedule == SCHEDULES.index("zb-h1"), pass_limits.forward_s - ahead, total - final)
    through: Column = np.where(layouts.chunks > 1, _interleaved_s(job, layouts, pass_limits, limits), m * final + fill)
    # In any order, a micro-batch passes all stages twice; only weight gradients need not be waited for.
    path = pass_limits.path_s
    through = np.where(among(layouts.schedule, _ANY_ORDER), path, np.maximum(through, path))
    through = np.maximum(through, _round_trips_s(job, layouts, pass_limits, limits))
    if job.stage_layers is not None:
        busiest, through = total / layouts.pp, path
    elif job.recompute is None:
        for crowd in crowds(layouts, pass_limits):
            busiest = np.maximum(busiest, crowd.busiest_s)
            through = np.maximum(through, crowd.span_s(layouts, limits))
        # All forward passes end before the first backward pass. Of a tiled network the sum is no bound.
        phased = (layouts.schedule == _GPIPE) & (np.asarray(layouts.mlp_tile_tokens) == 0)
        through = np.where(phased, np.maximum(through, total + (m - 1.0) * busiest), through)
    if np.any(layouts.ring):
        # Every rank runs all stages on its own micro-batches; the last stage is not recomputed.
        slowest = np.maximum.reduce([np.asarray(unit.recompute_s) for unit in costs.layers.values()])
        given = job.stage_layers
        last_recompute_s = (limits.most_last if given is None else given[-1]) * slowest
        busiest = np.where(layouts.ring, (total - last_recompute_s) / layouts.pp, busiest)
        through = np.where(layouts.ring, _travelling_s(job, layouts, pass_limits, limits), through)
    return busiest, through


def _round_trips_s(job: TrainingWork, layouts: Layouts, pass_limits: PassLimits, limits: Split) -> Column:
    """Return the least seconds in which all micro-batches go from the first rank down to the last stage and back.

    Activations of a stage wait on the first rank meanwhile, and the schedule limits how many do so at once: with 1F1B
    as many as there are ranks, interleaved (arXiv 2104.04473, section 2.2) those of the forward passes before the first
    backward pass. Of other schedules, and of jobs without backward passes, the result is 0.
    """
    if not job.backward:
        return 0.0
    pp, m, chunks = layouts.pp, layouts.accumulation, layouts.chunks
    send = neighbour_s(job, layouts)
    down_and_up = pass_limits.both_s + 2.0 * (pp - 1) * send
    plain = np.ceil(m / np.minimum(pp, m)) * down_and_up
    # Of the first rank's stages 0, p, 2 p, ... each waits for all that come after it.
    after = chunks * (pp * chunks - 1) - pp * chunks * (chunks - 1) / 2.0
    waiting = limits.first_s - limits.inner_s + chunks * limits.final_s + after * (limits.inner_s + 2.0 * send)
    most = np.minimum(2 * (pp - 1) + (chunks - 1) * pp + 1, m * chunks)
    several = np.where(layouts.schedule == _INTERLEAVED, m * waiting / most, 0.0)
    return np.asarray(np.where(layouts.schedule == _1F1B, plain, several))


def _extrapolated(layouts: Layouts) -> Mask:
    """Return a mask of layouts with so many actions that exact predictions extrapolate a part of the schedule.

    Only the busiest rank's work bounds such a prediction.
    """
    each = np.where(among(layouts.schedule, HALVED), 3, 2) * layouts.pp * layouts.chunks
    actions, m = each * layouts.accumulation, layouts.accumulation
    searched = among(layouts.schedule, CAPPED) & (m > 6 * layouts.pp)
    long: Mask = (actions > _FOLLOWED) | (searched & (actions > _SEARCHED - each * layouts.pp))
    return long & np.logical_not(layouts.ring)


def _outside_s(job: TrainingWork, layouts: Layouts, pass_limits: PassLimits, open_choices: Open | None) -> Column:
    """Return the least seconds of a step outside of its micro-batches."""
    costs, pp = pass_limits.costs, layouts.pp
    dense, expert = held_elements(job, layouts, costs)
    layers = job.model.layers
    parameters = RankParameters(
        dense,
        expert,
        np.maximum((layers + 2) / pp, 1.0),
        # Ranks without experts do not wait for those of others.
        sum(count for kind, count in costs.counts.items() if kind.moe) / pp,
        np.where(pp > 1, layers + 3.0 - pp, layers + 2.0),
        _least_elements(pp, costs),
    )
    # Longer passes hide more, so the passes that collectives run beside are the longest possible ones. Where ranks
    # share cores nothing is hidden, and ranks wait for each other in proportion to the passes.
    longest = pass_limits.most_backward_s
    if open_choices is not None and open_choices.recompute:
        # Recomputation may fill a rank's waits for others; it repeats forward passes at most.
        longest = pass_limits.backward_s + pass_limits.forward_s
    backward = pass_limits.backward_s if job.stack.wait_share else np.where(pp > 1, longest, pass_limits.backward_s)
    shared = sync(job, layouts, parameters, PassSeconds(pass_limits.forward_s / pp, backward / pp))
    # The update of parameters that stay gathered is not convex; the slowest rank may hide nothing.
    exposed = shared.gradient_exposed_s + shared.gather_exposed_s - np.where(pp > 1, shared.refresh_s, 0.0)
    slowdown = np.where(pp > 1, 0.0, shared.slowdown_s)
    owned = owned_elements(job, layouts, dense, expert)
    tensor = tensor_sync_s(job, layouts, costs.total("summed") / pp)
    if open_choices is None:
        offload_s, slower = _offloaded(job, layouts, pass_limits, owned)
        exposed, slowdown = np.maximum(exposed, offload_s), slowdown + slower
    share = layouts.gpu_fraction if open_choices is None else open_choices.updated
    optimizer = update_s(job, layouts, owned * share)
    return exposed + slowdown + tensor + optimizer + job.stack.overhead_s


def _least_elements(pp: Column, costs: Micro) -> LeastElements | None:
    """Return the least elements of a group on average over any pipeline rank's groups; None if no layout has several.

    A rank has a layer or more, and perhaps the embedding, the head, or both. A layout with one pipeline rank has no
    mean to be bounded: its least size is any larger one, as messages themselves limit it.
    """
    several = np.asarray(pp) > 1
    if not np.any(several):
        return None
    layer = np.minimum.reduce([np.asarray(unit.dense) for unit in costs.layers.values()])
    expert = np.minimum.reduce([np.asarray(unit.expert) for unit in costs.layers.values()])
    ends = costs.first.dense, costs.last.dense
    dense = np.minimum.reduce([layer, *((layer + end) / 2.0 for end in ends), (layer + sum(ends)) / 3.0])
    return LeastElements(np.where(several, dense, _ANY), np.where(several, expert / 3.0, _ANY))


def _offloaded(job: TrainingWork, layouts: Layouts, pass_limits: PassLimits, owned: Column) -> tuple[Column, Column]:
    """Return the least exposed seconds of offloading, and the least seconds by which it slows down the passes.

    Longer passes hide more of the host's work, and layers that recompute leave fewer bytes to offload. The exact share
    of such layers is known only with the stages, so the largest share counts where time falls with it. The host's work
    slows down passes in proportion to the time that both run, so the shortest passes count there.
    """
    rows = recorded(job, layouts)
    pp, m, costs = layouts.pp, layouts.accumulation, pass_limits.costs
    forward, backward = costs.total("forward_s") / pp, costs.total("backward_s") / pp
    if job.recompute is not None:
        most, longest = rows, backward
    else:
        most = rows.with_columns(recompute_share=shared_most(job, rows))
        recompute_s = sum(count * costs.layers[kind].recompute_s for kind, count in costs.counts.items()) / pp
        longest = backward + recompute_s * (most.recompute_share / np.maximum(rows.recompute_share, 1e-9) - 1.0)
    saved = saved_bytes(job, most)
    offloaded = offload(job, most, owned, saved_bytes=saved, passes_s=m * (forward + longest), last_s=longest)
    if np.all(np.asarray(longest) == backward):
        return offloaded.exposed_s, offloaded.slowdown_s
    slower = offload(job, most, owned, saved_bytes=saved, passes_s=m * (forward + backward), last_s=backward)
    return offloaded.exposed_s, slower.slowdown_s


def _travelling_s(job: TrainingWork, layouts: Layouts, pass_limits: PassLimits, limits: Split) -> Column:
    """Return a lower bound of the time that weights and gradients take from rank to rank.

    Per round of micro-batches, all gradients go around the ring once. Weights go around twice, or only once for the
    first and for the last stage if both passes of that stage follow each other directly. The owner of a stage does not
    receive the stage's weights.
    """
    costs, pp = pass_limits.costs, layouts.pp
    each = [unit.dense + unit.expert for unit in costs.layers.values()]
    elements = sum(count * size for count, size in zip(costs.counts.values(), each, strict=True))
    fullest = np.maximum.reduce([np.asarray(0.0 * pp + size) for size in each])
    largest = limits.most_layers * fullest
    moved = 2 * np.maximum(elements - largest, 0.0) * job.compute_bytes + elements * job.master_bytes
    share = (pp - 2) / np.maximum(pp - 1, 1)
    sent = layouts.accumulation / pp * share * moved
    stride = layouts.tp * layouts.cp * layouts.dp
    return collective.send_s(job, sent, stride) - collective.send_s(job, 0.0, stride)


def _interleaved_s(job: TrainingWork, layouts: Layouts, pass_limits: PassLimits, limits: Split) -> Column:
    """Return a lower bound of the time of schedules with several stages per rank and unsplit backward passes.

    Rank r waits until the first micro-batch has passed the first stage of each rank before rank r, and the ranks before
    rank r finish last; so the makespan is at least the mean over ranks of a rank's work and these two waits. It is at
    least the last rank's work and waits, too, where stages do not fold back to the first rank. Of the stages between
    the first and the last, the first few have a layer more if layers do not divide by stages.
    """
    m, before, chunks = layouts.accumulation, layouts.pp - 1, layouts.chunks
    more = limits.with_more
    # Of the stages 1 to pp - 2, as many as ``some`` have a layer more; all ranks after such a stage wait for it.
    some = np.maximum(np.minimum(more - 1, layouts.pp - 2), 0)
    longer = (some * before - 0.5 * some * (some + 1)) * limits.layer_s
    waits = before * limits.first_s + 0.5 * before * np.maximum(layouts.pp - 2, 0) * limits.inner_s + longer
    bound: Column = (m * pass_limits.both_s + waits) / layouts.pp
    # The last rank's stages are pp - 1, 2 pp - 1, ... and the last.
    larger = np.clip(more // layouts.pp, 0, chunks - 1)
    work = (chunks - 1) * limits.inner_s + larger * limits.layer_s + limits.final_s
    last = m * work + limits.first_s + np.maximum(layouts.pp - 2, 0) * limits.inner_s + some * limits.layer_s
    return np.asarray(np.where(np.logical_not(layouts.folded), np.maximum(last, bound), bound))
