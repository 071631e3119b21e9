"""Bytes of one pipeline rank's parameters, gathered parameters, gradients and optimizer state, on device and host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from partool.cost.case import Column, Layouts, Mask
from partool.cost.kinds import layer_places
from partool.cost.memory.rank_parameters import DENSE, MOE, GatherGroups, RankLoad, model_groups
from partool.cost.memory.stacks import MemoryStack
from partool.cost.tensor_shares import share_columns
from partool.cost.training.gathers import kept_elements
from partool.cost.training.host_state import accumulates, buffers, host_terms, state_bytes, waits_on_device, wire_bytes
from partool.cost.training.one_bit import kept_bytes
from partool.spec.model import ModelConfig
from partool.work.training import TrainingWork

HOST_FACTOR = 1.5
"""For other code bases, ratio of host memory to the training state kept there: pinned staging buffers and the
allocator's rounding (DeepSpeed's ``additional_buffer_factor`` in ``estimate_zero2_model_states_mem_needs``)."""


_UNITS_OFFLOADING = 3
"""Number of groups of parameters whose gradients may be in transfer to the host: two that wait and one that is
copied."""


class _Units(NamedTuple):
    """Elements of a rank's units; each field is a column."""

    dense: Column = 0.0
    moe: Column = 0.0
    expert: Column = 0.0
    input: Column = 0.0
    root: Column = 0.0


@dataclass(frozen=True)
class States:
    """Bytes of training state on one rank; each field is a column."""

    parameters: Column
    gathered: Column
    gradients: Column
    """Bytes of gradients when a backward pass ends."""
    gradients_before: Column
    """Bytes of gradients when activations are at their peak."""
    gradients_at_step: Column
    """Bytes of gradients during the optimizer's step."""
    optimizer: Column
    average: Column
    """Part of ``optimizer`` that is a moving average of the weights."""
    buffers: Column
    """Bytes of buffers for all-gathers of parameters and reductions of gradients."""
    grads_offloading: Column
    """Bytes of reduced gradients in transfer to the host, a part of all gradients of the passes."""
    kept_gathered: Column
    """With ZeRO-3, bytes of gathered parameters beside those of the units in use: those that stay gathered, and shards
    that are copied from the host."""
    dense_elements: Column
    """Elements of a dense layer, before ZeRO shards them; so are the next five. 0 on ranks without any."""
    moe_elements: Column
    """Elements of a layer with experts, without experts that ranks share; 0 on ranks without any."""
    expert_elements: Column
    """Elements of such a layer's experts that ranks share: they are gathered and reduced by themselves."""
    input_elements: Column
    """Elements of the embedding; 0 on ranks that do not hold it as the input of the first layer."""
    root_elements: Column
    """Elements of the final norm and the head, or of the tied embedding; 0 on ranks without a head."""
    tied_elements: Column
    """Elements of a matrix that the rank uses as the embedding and as the head."""
    expert_shards: Column
    """Number of ranks that share one copy of an expert's state."""
    dense_first: Column
    """Number of dense layers that come before all of the rank's layers with experts."""
    frozen_dense: Column
    """Part of ``dense_elements`` that has no gradients; so are the next four."""
    frozen_moe: Column
    frozen_expert: Column
    frozen_input: Column
    frozen_root: Column
    host: dict[str, Column]
    """Bytes in host memory, by key of :data:`partool.plan.terms.HOST_TERMS`."""

    def of_rows(self, rows: slice) -> States:
        """Return the state under some of the layouts; all columns are arrays [..., layouts]."""
        fields: dict[str, Any] = {name: column for name, column in self.__dict__.items() if name != "host"}
        host: dict[str, Column] = {name: np.asarray(column)[..., rows] for name, column in self.host.items()}
        return States(**{name: column[..., rows] for name, column in fields.items()}, host=host)


@dataclass(frozen=True)
class ElementCounts:
    """Numbers of elements on one rank before ZeRO shards elements; ``common`` counts elements outside of experts."""

    common: Column
    expert: Column
    trained: Column
    """Number of elements of ``common`` that are trained."""
    trained_expert: Column
    matrices: Column
    """Part of ``trained`` that an optimizer of whole matrices updates."""
    matrices_expert: Column
    """The same of ``trained_expert``."""
    pair: Column
    """Largest number of elements that two consecutive groups have together."""
    root: Column
    dense: Column
    """Number of elements of a dense layer."""
    moe: Column
    """Number of elements of a layer with experts, without experts that ranks share."""
    parallel: Column
    """Number of elements of the experts of such a layer, if ranks share them."""
    input: Column
    largest: Column
    """Number of elements of the largest group."""
    largest_trained: Column
    """Number of trained elements of the group that has most of them."""


def states(job: TrainingWork, layouts: Layouts, stack: MemoryStack, load: RankLoad) -> States:
    """Return the bytes of the training state of a rank."""
    sizes = element_counts(job, layouts, load)
    small = job.compute_bytes
    master = job.master_bytes if stack.wide_weights else small
    zero, on_host, shards = layouts.zero, 1.0 - layouts.gpu_fraction, state_shards(layouts)
    if stack.pipeline_keeps_whole:
        layouts = layouts.with_columns(zero=np.where(layouts.pp > 1, np.minimum(zero, 1), zero))

    def sharded(stage: int, of: tuple[Column, Column] = (sizes.common, sizes.expert)) -> Column:
        cut = np.where(zero >= stage, shards, 1)
        common, expert = of
        return np.ceil(common / cut) + np.ceil(expert / _expert_shards(layouts, cut, zero >= stage))

    everywhere, trained = sharded(1), sharded(1, (sizes.trained, sizes.trained_expert))
    kept_wide = master * everywhere * (1 - on_host)
    parameters: Column
    optimizer: Column
    if stack.resident_copy:
        parameters = small * sharded(3) + np.where(stack.wide_weights, kept_wide, 0)
    elif stack.narrow_beside_host:
        # With the optimizer in host memory, all masters count as optimizer state, also masters that stay on the device.
        parameters = np.where(on_host > 0, small * everywhere, kept_wide)
    else:
        parameters = kept_wide + np.where(on_host > 0, small * everywhere, 0.0)
    if narrow := stack.narrow_frozen and bool(job.frozen) and bool(job.backward):
        frozen = sharded(1, (sizes.common - sizes.trained, sizes.expert - sizes.trained_expert))
        narrow_parameters = _narrow_parameters(job, layouts, sizes, frozen, trained)
        parameters = np.where(np.asarray(layouts.ring), parameters, narrow_parameters)
    parameters = parameters + _copied(job, layouts, sizes, everywhere)
    stored = np.where((on_host > 0) & stack.narrow_beside_host, small * everywhere, parameters)
    away = np.where(layouts.offload_parameters == 1, stored, 0.0)
    ended, before, stepping = _gradients(job, layouts, stack, sizes.trained + sizes.trained_expert, trained)
    grads_offloading = _grads_offloading(job, layouts, stack, sizes)
    gradients = ended + grads_offloading, before + grads_offloading, stepping
    moments = job.moments * master * trained + kept_bytes(job, layouts, trained)
    if job.matrices is not None:
        matrices = sharded(1, (sizes.matrices, sizes.matrices_expert))
        moments = moments - (job.moments - job.matrices.moments) * master * matrices
    managed = _managed(layouts, sizes) if narrow else sizes.common + sizes.expert
    gathered = _gathered(job, layouts, stack, sizes, managed)
    if stack.counted_host_memory:
        terms = host_terms(job, layouts, on_host * trained)
        optimizer = np.where(on_host > 0, state_bytes(job) * trained, moments) * (1 - on_host)
    else:
        optimizer = moments * (1 - on_host)
        state = on_host * (moments + (2 * master if stack.wide_weights else master) * trained)
        terms = {"masters": HOST_FACTOR * state}
    terms["parameters"] = _stored(job, layouts, stack, away, sizes)
    buffers = _buffers(job, layouts, stack, sizes, narrow=narrow)
    # Shards that are being copied to the device exist in addition to the gathered parameters.
    kept = (
        small * kept_elements(job.model, job.controls.persistent_elements)
        + teacher_bytes(job, layouts)[1]
        + 0.0 * sizes.root
    )
    if stack.copies_shards_ahead:
        copied = np.where(layouts.offload_parameters == 1, 2 * small * sizes.largest / shards, 0.0)
        gathered, kept = gathered + copied, kept + copied
    units = _units(job, layouts, sizes, load, narrow=narrow)
    return States(
        parameters - away, gathered, *gradients, optimizer + job.average_bytes * trained, job.average_bytes * trained,
        buffers, grads_offloading, kept, **units, host=terms,
    )  # fmt: skip


def _narrow_parameters(
    job: TrainingWork, layouts: Layouts, sizes: ElementCounts, frozen: Column, trained: Column
) -> Column:
    """Return the bytes of masters of what is trained, and of the rest in the compute type.

    ``frozen`` and ``trained`` are shards of elements. Frozen parameters are whole below ZeRO-3, unless they are
    gathered from host memory.
    """
    small, narrow = job.compute_bytes, layouts.gpu_fraction < 1
    gathers = (np.asarray(layouts.zero) == 3) | (np.asarray(layouts.offload_parameters) == 1)
    unsharded = sizes.common - sizes.trained + sizes.expert - sizes.trained_expert
    return small * np.where(gathers, frozen, unsharded) + np.where(narrow, small, job.master_bytes) * trained


def _copied(job: TrainingWork, layouts: Layouts, sizes: ElementCounts, sharded: Column) -> Column:
    """Return the bytes of a teacher, or of a reference's frozen copy.

    Neither has masters, and both are whole on each rank below ZeRO-3.
    """
    if not job.reference_copy:
        return teacher_bytes(job, layouts)[0]
    elements = np.where(np.asarray(layouts.zero) == 3, sharded, sizes.common + sizes.expert)
    return job.compute_bytes * elements


def teacher_bytes(job: TrainingWork, layouts: Layouts) -> tuple[Column, Column]:
    """Return the bytes of a teacher, and of its root module while the student's passes run.

    With ZeRO-3 its output matrix stays gathered until the student's loss. There is one pipeline stage.
    """
    teacher = job.teacher
    if teacher is None:
        return 0.0, 0.0
    places = layer_places(teacher.model)
    layers = tuple(float(places.count(place)) for place in range(MOE + len(teacher.model.expert_shapes)))
    load = RankLoad(layers, 1.0, 1.0, 1.0, {})
    sizes = element_counts(teacher, layouts, load)
    cut = np.where(np.asarray(layouts.zero) == 3, state_shards(layouts), 1)
    stored = np.ceil(sizes.common / cut) + np.ceil(sizes.expert / _expert_shards(layouts, cut, layouts.zero == 3))
    root = np.where(np.asarray(layouts.zero) == 3, sizes.root, 0.0)
    return job.compute_bytes * stored, job.compute_bytes * root


def _managed(layouts: Layouts, sizes: ElementCounts) -> Column:
    """Return the number of elements that are gathered where frozen parameters are whole below ZeRO-3."""
    gathers = (np.asarray(layouts.zero) == 3) | np.asarray(layouts.ring)
    return np.where(gathers, sizes.common + sizes.expert, sizes.trained + sizes.trained_expert)


def _units(
    job: TrainingWork, layouts: Layouts, sizes: ElementCounts, load: RankLoad, *, narrow: bool
) -> dict[str, Any]:
    """Return the fields of :class:`States` that say what is gathered and reduced at once.

    ``narrow`` means that frozen parameters are not gathered below ZeRO-3.
    """
    # partool gathers a tied matrix with the final norm, if one rank uses it at both ends.
    tied = sizes.input * load.last if job.model.tied_embeddings else 0.0
    mixed = _dense_first(job.model) & (load.expert_layers > 0)
    units = _Units(sizes.dense, sizes.moe, sizes.parallel, sizes.input - tied, sizes.root + tied)
    frozen = _Units()
    if narrow:
        groups = _groups(job)
        dense, *of_experts = groups.trained_layers
        moe = max(of_experts)
        ends = groups.trained_embedding, np.where(np.asarray(tied) > 0, groups.trained_embedding, groups.trained_head)
        shares = _Units(dense, moe, moe, *ends)
        trained = _Units(*(share * unit for share, unit in zip(shares, units, strict=True)))
        ring = np.asarray(layouts.ring)
        gathers = (np.asarray(layouts.zero) == 3) & ~ring
        frozen = _Units(*(np.where(gathers, u - t, 0.0) for u, t in zip(units, trained, strict=True)))
        units = _Units(*(np.where(gathers | ring, u, t) for u, t in zip(units, trained, strict=True)))
    return {
        "dense_elements": units.dense,
        "moe_elements": units.moe,
        "expert_elements": units.expert,
        "input_elements": units.input,
        "root_elements": units.root,
        "tied_elements": tied * (groups.trained_embedding if narrow else 1.0) + 0.0 * sizes.root,
        "expert_shards": _expert_shards(layouts, state_shards(layouts), layouts.zero > 0),
        "dense_first": np.where(mixed, load.layers[DENSE], 0.0),
        **{f"frozen_{name}": column + 0.0 * sizes.root for name, column in frozen._asdict().items()},
    }


def _grads_offloading(job: TrainingWork, layouts: Layouts, stack: MemoryStack, sizes: ElementCounts) -> Column:
    """Return the maximum bytes of reduced gradients in transfer to the host; at this limit the backward pass waits."""
    if not stack.buckets_to_host:
        return 0.0
    offloads = (layouts.gpu_fraction < 1) & np.logical_not(waits_on_device(layouts))
    size = _UNITS_OFFLOADING * wire_bytes(job, layouts) * sizes.largest / state_shards(layouts)
    return np.where(offloads, np.minimum(size, wire_bytes(job, layouts) * sizes.trained), 0.0)


def _stored(job: TrainingWork, layouts: Layouts, stack: MemoryStack, away: Column, sizes: ElementCounts) -> Column:
    """Return the host bytes of parameter shards; if shards are in files, only groups in transfer take host memory."""
    if not stack.counted_host_memory:
        return HOST_FACTOR * away
    if job.offload.parameters == "nvme":
        unit = job.compute_bytes * np.ceil(sizes.largest / state_shards(layouts))
        return np.asarray(np.minimum(away, buffers(job) * unit))
    return away


def state_shards(layouts: Layouts) -> Column:
    """Return the number of ranks that share one copy of the state; sequence-parallel ranks are included."""
    return np.where(layouts.zero > 0, layouts.shards * layouts.cp, 1)


def _expert_shards(layouts: Layouts, shards: Column, sharded: Mask) -> Column:
    """Return the number of ranks among which the state of a rank's experts is divided, where it is ``sharded``."""
    with_tensor = np.where((layouts.ep > 1) & sharded, layouts.tp, 1)
    return np.maximum(1, shards * with_tensor / layouts.expert_ranks)


def _dense_first(model: ModelConfig) -> bool:
    return model.moe is not None and model.moe.first_dense_layers > 0 and model.moe.every == 1


def _groups(job: TrainingWork) -> GatherGroups:
    return model_groups(job.model, job.padded_vocab, job.frozen, job.few_bits)


def element_counts(job: TrainingWork, layouts: Layouts, load: RankLoad) -> ElementCounts:
    """Return the numbers of elements on ranks with a ``load``."""
    groups, shares = _groups(job), share_columns(job, layouts)
    common: Column = 0.0
    expert: Column = 0.0
    trained: Column = 0.0
    trained_expert: Column = 0.0
    matrices: Column = 0.0
    matrices_expert: Column = 0.0
    layers: list[Column] = []
    for kind in range(len(shares.layers)):
        (one, experts), count = shares.layers[kind], load.layers[kind]
        one = one - job.shared_elements / job.model.layers
        common, expert = common + one * count, expert + experts * count
        trained = trained + groups.trained_layers[kind] * one * count
        trained_expert = trained_expert + groups.trained_layers[kind] * experts * count
        matrices = matrices + groups.trained_matrices[kind] * shares.matrices[kind] * count
        matrices_expert = matrices_expert + groups.trained_matrices[kind] * experts * count
        layers.append(np.where(count > 0, one + experts, 0.0))
    largest_layer = np.maximum.reduce(np.broadcast_arrays(*layers))
    parallel, moe = _largest_units(job, layouts, layers)
    embedding, head = shares.embedding, shares.head
    if not job.stack.vocab_parallel:
        embedding, head = (group.cut + group.replicated for group in (groups.embedding, groups.head))
    head = head + job.shared_elements
    # A tied matrix is held by the first and by the last stage.
    tied = job.model.tied_embeddings
    extra = embedding * load.last * (1 - load.first) if tied else 0.0
    outer = embedding * load.first + head * load.last + extra
    input_group = embedding * load.first
    root = head * load.last + extra
    follows = np.where(load.layer_count > 1, largest_layer, 0.0)
    return ElementCounts(
        common=common + outer,
        expert=expert,
        trained=trained
        + groups.trained_embedding * (embedding * load.first + extra)
        + groups.trained_head * head * load.last,
        trained_expert=trained_expert,
        matrices=matrices,
        matrices_expert=matrices_expert,
        pair=np.maximum(largest_layer + follows, input_group + largest_layer),
        root=root,
        dense=layers[DENSE],
        moe=moe,
        parallel=parallel,
        input=input_group,
        largest=np.maximum(np.maximum(largest_layer, input_group), root),
        largest_trained=np.maximum.reduce(
            np.broadcast_arrays(
                *(share * layer for share, layer in zip(groups.trained_layers, layers, strict=True)),
                groups.trained_embedding * input_group,
                groups.trained_head * root,
            )
        ),
    )


def _largest_units(job: TrainingWork, layouts: Layouts, layers: Sequence[Column]) -> tuple[Column, Column]:
    """Return the most elements of experts that ranks share of any layer, and the most of the rest of such a layer.

    ``layers`` are the elements of a layer of each kind, 0 where a rank has none.
    """
    if not job.model.moe:
        return 0.0, layers[MOE]
    shared = [
        np.where((layer > 0) & (layouts.ep > 1), experts, 0.0)
        for layer, (_, experts) in zip(layers[MOE:], share_columns(job, layouts).layers[MOE:], strict=True)
    ]
    rest = [layer - experts for layer, experts in zip(layers[MOE:], shared, strict=True)]
    return tuple(np.maximum.reduce(np.broadcast_arrays(*each)) for each in (shared, rest))


def _gathered(
    job: TrainingWork, layouts: Layouts, stack: MemoryStack, sizes: ElementCounts, everything: Column
) -> Column:
    """Return the bytes of gathered parameters.

    With ZeRO-3, four sorts of parameters are gathered at once: those in use, those prefetched, those that are kept
    gathered, and those of the root module.
    """
    small = job.compute_bytes
    if stack.live_elements:
        # The limit only stops prefetching; the groups in use come on top of it.
        partial = np.minimum(everything, stack.live_elements + sizes.pair + sizes.root)
    else:
        partial = _ahead(job, sizes, everything) + sizes.root
    copies = (layouts.zero > 0) | stack.copies_alone
    lasting = 0.0 if stack.resident_copy else np.where(copies, everything - _in_place(job, layouts, stack, sizes), 0.0)
    # Ranks that pass weights on copy the weights of their own stages, and cast those of the outer modules where used.
    lasting = np.where(layouts.ring, everything - sizes.input - sizes.root, lasting)
    return small * np.where((layouts.zero == 3) & ~np.asarray(layouts.ring), partial, lasting)


def _in_place(job: TrainingWork, layouts: Layouts, stack: MemoryStack, sizes: ElementCounts) -> Column:
    """Return how many elements a rank computes with where their masters lie: those that it shares with no other rank.

    Masters of another type than that of the computation are cast, so that their casts are copies.
    """
    if not stack.masters_in_place or job.compute_bytes != job.master_bytes:
        return 0.0
    shards = state_shards(layouts)
    experts = _expert_shards(layouts, shards, layouts.zero > 0)
    narrow = stack.narrow_frozen and bool(job.frozen) and bool(job.backward)
    managed = (sizes.trained, sizes.trained_expert) if narrow else (sizes.common, sizes.expert)
    alone = np.where(shards == 1, managed[0], 0.0) + np.where(experts == 1, managed[1], 0.0)
    return np.where((layouts.gpu_fraction == 1) & (np.asarray(layouts.offload_parameters) == 0), alone, 0.0)


def _ahead(job: TrainingWork, sizes: ElementCounts, everything: Column) -> Column:
    """Return the total number of elements in the group in use, in prefetched groups, and in persistent parameters."""
    depth = job.controls.prefetch
    groups = sizes.largest if depth == 0 else sizes.pair + (depth - 1) * sizes.largest
    if depth == 1 and not job.controls.persistent_elements:
        return groups
    return np.minimum(everything, groups + kept_elements(job.model, job.controls.persistent_elements))


def _gradients(
    job: TrainingWork, layouts: Layouts, stack: MemoryStack, unsharded: Column, sharded: Column
) -> tuple[Column, Column, Column]:
    """Return the bytes of gradients at a backward pass's end, at the peak of activations, and at the optimizer step."""
    master = job.master_bytes if stack.wide_weights else job.compute_bytes
    size: Column = stack.gradient_bytes or master
    if stack.buckets_to_host:
        # With the optimizer in host memory, gradients have the type of their transfer, sums the type of masters.
        kept = np.where(accumulates(layouts), job.master_bytes, wire_bytes(job, layouts))
        size = np.where(layouts.gpu_fraction < 1, kept, size)
    if stack.lasting_gradients or stack.resident_copy:
        uncut: Mask = layouts.zero < 2
    else:
        # Gradients are reduced as soon as they are complete, unless they have to accumulate unsharded.
        uncut = (layouts.zero == 1) & (layouts.accumulation > 1)
    gradients: Column = size * np.where(uncut, unsharded, sharded)
    at_step: Column = stack.step_gradient_bytes * sharded
    if stack.wide_bf16_gradients != "never" and job.precision == "bf16":
        wide = (layouts.pp > 1) | (stack.wide_bf16_gradients == "always")
        gradients = np.where(wide, job.master_bytes * unsharded, gradients)
        at_step = np.where(wide, 0.0, at_step)
    lasting = stack.lasting_gradients | (layouts.accumulation > 1)
    before = np.where(lasting, gradients, 0.0)
    on_device = layouts.gpu_fraction
    if stack.buckets_to_host:
        on_device = np.where(waits_on_device(layouts), 1, on_device)
    elif not stack.host_accumulates:
        on_device = np.where(layouts.accumulation > 1, 1, on_device)
    ended = gradients + stack.narrow_gradient_bytes * unsharded
    stepping = gradients * on_device + at_step * layouts.gpu_fraction
    return ended * on_device, before * on_device, stepping


def _buffers(job: TrainingWork, layouts: Layouts, stack: MemoryStack, sizes: ElementCounts, *, narrow: bool) -> Column:
    """Return the bytes of buffers: an all-gather's message, and buckets of gradients in compute and reduction type.

    A sequential gather writes directly into the parameters and needs no message. Ranks that pass weights on have other
    buffers (:class:`~partool.cost.memory.rank_parameters.WeightRing`).
    """
    small = job.compute_bytes
    master = job.master_bytes if stack.wide_weights else small
    grouped = layouts.dp * layouts.cp > 1
    if stack.bucket_elements:
        buckets = 2 * small * np.minimum(stack.bucket_elements, sizes.common + sizes.expert)
        return np.where(grouped & (layouts.zero > 0), buckets, 0.0)
    if stack.resident_copy:
        return 0.0 * sizes.largest
    grouped = grouped if not stack.copies_alone else grouped | (layouts.tp * layouts.pp > 1)
    grouped = grouped & ~np.asarray(layouts.ring)
    whole_message = np.where((layouts.zero > 0) & (job.controls.gather == "sequential"), 0, small)
    buckets = job.backward * (small + master)
    trained = sizes.largest_trained if narrow else sizes.largest
    messages = np.where(np.asarray(layouts.zero) == 3, sizes.largest, trained) * whole_message
    return np.where(grouped, messages + trained * buckets, 0.0)
