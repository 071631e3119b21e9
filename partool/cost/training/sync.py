"""Seconds of ZeRO's collectives of gradients and parameters, and the part that compute hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from partool.cost import collective
from partool.cost.case import Column, Layouts
from partool.cost.collective import RankGroup
from partool.cost.memory.stacks import memory_stack
from partool.cost.time.tensor import tensor_group
from partool.cost.training.gathers import kept_elements, messages_of_unit
from partool.cost.training.micro import micro
from partool.cost.training.one_bit import message_bytes
from partool.cost.training.traffic import trained_share
from partool.work.training import OneBitUpdates, TrainingWork

_ALWAYS_EXPOSED = 0.08
"""Share of gradient reduction that is exposed even in long backward passes, as the first layers' gradients come
last."""


@dataclass(frozen=True)
class Sync:
    """Seconds of ZeRO's collectives on one rank per optimizer step."""

    gradient_s: Column
    gradient_exposed_s: Column
    gather_s: Column
    gather_exposed_s: Column
    slowdown_s: Column
    """Seconds by which overlapping collectives slow down compute."""
    refresh_s: Column
    """Part of ``gather_exposed_s`` that updates the parameters that stay gathered."""


@dataclass(frozen=True)
class LeastElements:
    """Least numbers of elements of any pipeline rank per group of parameters: outside experts and inside."""

    dense: Column
    expert: Column


@dataclass(frozen=True)
class RankParameters:
    """Numbers of one rank's parameters outside and inside experts, and of the groups in which parameters are sent."""

    dense: Column
    expert: Column
    groups: Column
    expert_groups: Column | None = None
    """Number of groups that hold experts, for a mean over pipeline ranks; None: all groups, if there are experts."""
    most_groups: Column | None = None
    """Largest number of groups of any pipeline rank, for a mean over pipeline ranks; None: ``groups``."""
    least: LeastElements | None = None
    """Least elements of a group of any pipeline rank, for a mean over pipeline ranks: collectives take the convex lower
    bound of their time for messages of at least this size. None: they take their time."""

    @property
    def expert_messages(self) -> Column:
        """Number of groups in which experts are sent."""
        return np.where(self.expert > 0, self.groups if self.expert_groups is None else self.expert_groups, 0.0)


def sync(job: TrainingWork, layouts: Layouts, parameters: RankParameters, passes: PassSeconds) -> Sync:
    """Return the seconds of collectives of a rank's parameters and gradients among data-parallel ranks."""
    stack, zero, m = job.stack, layouts.zero, layouts.accumulation
    # With ZeRO-3, passes that find perturbations gather once more; they reduce nothing.
    turns, both = m * (1.0 + job.perturbed), 1.0 + job.backward
    # So do passes of a reference, forward alone.
    referred = m * job.reference_passes
    if stack.pipeline_keeps_whole:
        zero = np.where((layouts.pp > 1) & (zero >= 2), 1, zero)
    shards, replicas = collective.axis_group(job, layouts, "shards"), collective.axis_group(job, layouts, "replicas")
    everyone = collective.group(job, layouts.dp * layouts.cp, layouts.tp)
    owners = _expert_group(job, layouts)
    reduce_bytes, whole_bytes = _wire_bytes(job)
    reduce_bytes = reduce_bytes * trained_share(job.model, job.frozen, job.few_bits)
    # This holds on CPUs too: partool's reduce-scatter sends each part once, whereas gloo's is an all-reduce.
    scatter = _groups_s(job, collective.scatter_s, parameters, reduce_bytes, (shards, owners))
    gather_bytes = whole_bytes * _gathered_share(job, layouts, zero)
    gather = _gather_s(job, parameters, gather_bytes, zero, (shards, owners))
    each = reduce_bytes / shards.size
    least = None if parameters.least is None else parameters.least.dense * each
    between = collective.all_reduce_s(job, parameters.dense * each, replicas, least)
    around = _groups_s(job, collective.all_reduce_s, parameters, reduce_bytes, (everyone, owners))
    rounds = np.where(zero >= 2, m, 1)
    gradient: Column = job.backward * np.where(zero == 0, around, rounds * scatter + between)
    gathered: Column = np.where(zero == 0, 0.0, np.where(zero == 3, (both * turns + referred) * gather, gather))
    refresh = _refresh_s(job, parameters, gather_bytes, zero, shards)
    # Forward passes hide gathers; backward passes hide reductions and, in ZeRO-3, the gathers of the same passes.
    ahead: Column = np.where(zero == 3, (turns + referred) * gather, np.where(zero > 0, gather, 0.0))
    behind, of_teacher = gathered - ahead, _teacher_s(job, layouts, zero, (shards, owners))
    ahead, gathered = ahead + of_teacher, gathered + of_teacher
    # Without prefetching, ZeRO-3 waits for each gather.
    looks = np.where((zero == 3) & (job.controls.prefetch == 0), 0.0, 1.0)
    forward_room = looks * stack.overlap_gathers * np.where(zero == 3, m, 1) * passes.forward_s
    backward_room = stack.overlap_gradients * np.where(zero >= 2, m, 1) * passes.backward_s
    most = parameters.groups if parameters.most_groups is None else parameters.most_groups
    first = np.where(zero == 3, turns + referred, 1) * gather / np.maximum(most, 1)
    before = np.maximum(ahead - forward_room, np.minimum(first, ahead))
    hideable = gradient + looks * behind
    after = np.maximum(hideable - backward_room, _ALWAYS_EXPOSED * gradient)
    if job.perturbed:
        after = np.maximum(after, gradient - backward_room / (1.0 + job.perturbed))
    after = after + (1.0 - looks) * behind
    part = gradient / np.maximum(gradient + behind, 1e-30)
    exposed, shown = part * after, before + (1.0 - part) * after + refresh
    gathered = gathered + refresh
    at_sums, at_gathers = _wait_shares(job, layouts)
    forward, backward = m * passes.forward_s, m * passes.backward_s
    waits = job.backward * at_sums * np.where(zero == 0, forward + backward, backward)
    if job.one_bit is None:
        exposed = exposed + waits
    else:
        averaged: tuple[Column, Column, Column] = (gradient, exposed, waits)
        gradient, exposed = _one_bit(job, parameters, everyone, job.one_bit, averaged)
    shown = shown + at_gathers * np.where(zero == 0, 0.0, np.where(zero == 3, forward + backward, forward))
    hidden = np.minimum(gradient + gathered - exposed - shown, m * passes.both_s)
    slowdown = np.maximum(hidden, 0.0) * (stack.contention - 1.0)
    return Sync(gradient, exposed, gathered, shown, slowdown, refresh)


def _teacher_s(job: TrainingWork, layouts: Layouts, zero: Column, groups: tuple[RankGroup, RankGroup]) -> Column:
    """Return the seconds in which a step's passes of a teacher gather its parameters, which ZeRO-3 alone shards."""
    if job.teacher is None:
        return 0.0
    costs, counted = micro(job.teacher, layouts), job.teacher.model.layers + 2.0
    parameters = RankParameters(costs.total("dense"), costs.total("expert"), counted)
    gather = _gather_s(job.teacher, parameters, float(job.compute_bytes), zero, groups)
    return np.asarray(np.where(zero == 3, job.taught * layouts.accumulation * gather, 0.0))


def _gathered_share(job: TrainingWork, layouts: Layouts, zero: Column) -> Column:
    """Return the share of the parameters that is gathered: without frozen ones, if these are whole on each rank."""
    if not job.backward or not memory_stack(job.stack.name).narrow_frozen:
        return 1.0
    everything = (np.asarray(zero) == 3) | np.asarray(layouts.ring)
    return np.where(everything, 1.0, trained_share(job.model, job.frozen, job.few_bits))


def _one_bit(
    job: TrainingWork,
    parameters: RankParameters,
    ranks: RankGroup,
    updates: OneBitUpdates,
    averaged: tuple[Column, Column, Column],
) -> tuple[Column, Column]:
    """Return the mean seconds of reductions, and the exposed part, over the kinds of steps.

    ``averaged`` are the seconds, the exposed ones and the waits of a step whose gradients are averaged. Exchanges of
    bits come after the passes, which hide nothing of them.
    """
    full, one_bit = updates.share("full"), updates.share("one_bit")
    trained = trained_share(job.model, job.frozen, job.few_bits)
    message = message_bytes(job, parameters.dense * trained)
    least = None if parameters.least is None else message_bytes(job, parameters.least.dense * trained)
    exchange = np.where(
        ranks.size > 1,
        collective.all_to_all_s(job, message, ranks, least) + collective.gather_s(job, message, ranks, least),
        0.0,
    )
    gradient, exposed, waits = averaged
    return full * gradient + one_bit * exchange, full * (exposed + waits) + one_bit * (exchange + waits)


def _wait_shares(job: TrainingWork, layouts: Layouts) -> tuple[Column, Column]:
    """Return a rank's waits at reductions and at gathers for ranks on the same cores, as shares of the passes' time.

    With pipelines, replicas of shards or an optimizer in host memory, a rank waits for every reduction. Otherwise, with
    ZeRO-2 and 3, it waits for the reductions of every micro-batch after the first, because their results are added to
    the first result. A rank waits for gathers that are not prefetched.
    """
    stack, zero, m, controls = job.stack, layouts.zero, layouts.accumulation, job.controls
    several = np.asarray(layouts.dp) > 1
    in_flight = ((zero == 0) | (layouts.replicas == 1)) & (layouts.pp == 1) & (layouts.gpu_fraction == 1.0)
    waited = np.where(zero >= 2, (m - 1) / m, 0.0)
    sums = stack.overlapped_wait_share + waited * (stack.wait_share - stack.overlapped_wait_share)
    in_turn = (controls.gather == "sequential") | (
        (zero == 3) & ((controls.prefetch == 0) | (controls.persistent_elements > 0))
    )
    ahead = ~in_turn & (layouts.pp == 1) & (np.asarray(layouts.offload_parameters) == 0)
    gathers = np.where(ahead, stack.overlapped_wait_share, stack.wait_share)
    return np.where(several, np.where(in_flight, sums, stack.wait_share), 0.0), np.where(several, gathers, 0.0)


def pipeline_wait(job: TrainingWork, layouts: Layouts) -> Column:
    """Return a pipeline rank's wait for ranks on the same cores, per second of passes; 0 if collectives include it.

    On shared cores identical stages take turns, whatever the schedule says.
    """
    return np.where((layouts.pp > 1) & (layouts.dp == 1), job.stack.wait_share, 0.0)


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a rank's passes over one micro-batch."""

    forward_s: Column
    backward_s: Column

    @property
    def both_s(self) -> Column:
        """Seconds of both passes."""
        return self.forward_s + self.backward_s


def _groups_s(
    job: TrainingWork,
    cost: Callable[[TrainingWork, Column, RankGroup, Column | None], Column],
    parameters: RankParameters,
    each_bytes: Column,
    ranks: tuple[RankGroup, RankGroup],
) -> Column:
    """Return the total seconds of collectives, one per group of parameters; experts have a separate rank group."""
    everyone, owners = ranks
    per_layer, least = job.stack.collectives_per_layer, parameters.least
    groups, some = per_layer * parameters.groups, per_layer * parameters.expert_messages
    least_dense, least_expert = (
        (None, None) if least is None else (size * each_bytes / per_layer for size in (least.dense, least.expert))
    )
    dense = cost(job, parameters.dense * each_bytes / groups, everyone, least_dense)
    if not np.any(parameters.expert):
        return groups * dense
    expert = cost(job, parameters.expert * each_bytes / np.maximum(some, 1e-30), owners, least_expert)
    return groups * dense + some * expert


def _gather_s(
    job: TrainingWork, parameters: RankParameters, each_bytes: Column, zero: Column, ranks: tuple[RankGroup, RankGroup]
) -> Column:
    """Return the seconds of gathering all parameters once, except those that stay gathered with ZeRO-3."""
    controls = job.controls
    messages = messages_of_unit(job.model, controls)
    in_messages = _in_messages(parameters, messages)
    everything = _groups_s(job, collective.gather_s, in_messages, each_bytes, ranks)
    if not controls.persistent_elements:
        return everything
    kept = np.minimum(parameters.dense, kept_elements(job.model, controls.persistent_elements))
    fewer = messages_of_unit(job.model, controls, zero=3)
    least = parameters.least and LeastElements(0.0, 0.0)
    rest = _in_messages(replace(parameters, dense=parameters.dense - kept, least=least), fewer)
    return np.where(zero == 3, _groups_s(job, collective.gather_s, rest, each_bytes, ranks), everything)


def _in_messages(parameters: RankParameters, each: int) -> RankParameters:
    """Return the same parameters, with ``each`` messages per group."""
    some = None if parameters.expert_groups is None else parameters.expert_groups * each
    least = parameters.least and LeastElements(parameters.least.dense / each, parameters.least.expert / each)
    return replace(parameters, groups=parameters.groups * each, expert_groups=some, least=least)


def _refresh_s(
    job: TrainingWork, parameters: RankParameters, each_bytes: Column, zero: Column, ranks: RankGroup
) -> Column:
    """Return the seconds of the message that updates the parameters that stay gathered; it is sent once a step."""
    if not job.controls.persistent_elements:
        return 0.0
    kept = np.minimum(parameters.dense, kept_elements(job.model, job.controls.persistent_elements))
    return np.where(zero == 3, collective.gather_s(job, kept * each_bytes, ranks), 0.0)


def _expert_group(job: TrainingWork, layouts: Layouts) -> RankGroup:
    ranks = layouts.dp * layouts.cp
    with_tensor = np.where(layouts.ep > 1, layouts.tp, 1)
    size = np.maximum(ranks * with_tensor // np.maximum(layouts.expert_ranks, 1), 1)
    return collective.group(job, size, layouts.tp * layouts.expert_ranks)


def _wire_bytes(job: TrainingWork) -> tuple[float, float]:
    if job.precision in ("fp32", "fp64"):
        return float(job.master_bytes), float(job.compute_bytes)
    return job.stack.gradient_bytes, job.stack.gather_bytes


def tensor_sync_s(job: TrainingWork, layouts: Layouts, elements: Column) -> Column:
    """Return the seconds in which tensor ranks sum partial gradients once a step; each rank sums its shard."""
    cut = np.where(np.asarray(layouts.zero) > 0, layouts.shards * layouts.cp, 1)
    reduced = collective.all_reduce_s(job, elements / cut * job.master_bytes, tensor_group(job, layouts, "tp"))
    return np.where(np.asarray(elements) > 0, reduced, 0.0)
