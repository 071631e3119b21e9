"""Predict a rank's peak memory by term and the total's error: approximately for many layouts, exactly for one.

The peak is the maximum over a step's phases: the loss (all activations and the logits), the first layer of the backward
pass (all activations and one layer's working memory), the end of the backward pass (all gradients), and the optimizer's
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from partool.catalog.profile import SMALLEST_ERROR
from partool.cost.case import Column, Layouts
from partool.cost.codec import encode
from partool.cost.evidence import MEMORY_FLOOR, memory_excess
from partool.cost.memory.fit import fit_probability, verdict
from partool.cost.memory.layout_ranks import loads_of_layout
from partool.cost.memory.rank_parameters import RankLoad
from partool.cost.memory.stacks import MemoryStack, memory_stack
from partool.cost.training.communicators import communicators
from partool.cost.training.forward_moments import all_phases, forward_moments
from partool.cost.training.host_state import pinned_terms
from partool.cost.training.moments import Moment, either, fullest, plain_moments, ring_moments
from partool.cost.training.optimizer import working_bytes
from partool.cost.training.parts import Place, least_passes, least_state, parts
from partool.cost.training.pass_bytes import PassBytes, bytes_of_layers, pass_bytes
from partool.cost.training.runtime_moments import moments
from partool.cost.training.states import States, states
from partool.plan.layout import Layout
from partool.plan.terms import HOST_TERMS, MEMORY_TERMS
from partool.plan.types import MemoryPrediction, RankMemory
from partool.spec.numbers import GIB, MIB
from partool.work.training import TrainingWork

FRAMEWORK_BYTES = {"cpu": 290 * MIB, "cuda": int(1.2 * GIB), "rocm": int(1.5 * GIB)}
"""Bytes of the framework. On a CPU rank these are the interpreter and libraries (resident set of a torch 2.13 process
with gloo before its first step). On an accelerator they are the device context and library workspaces (0.5 to 1.3 GiB
seen by nvidia-smi, more where large workspaces are kept)."""
FRAGMENTATION = {True: 0.03, False: 0.10}
"""Allocator overhead on an accelerator as a share of everything allocated, with expandable segments and without. Both
are assumptions: published peaks lie between them, and few runs state the setting."""
CPU_FRAGMENTATION = 0.75
"""Fragmentation on a CPU as a share of everything allocated. It includes the temporaries of the backward pass: glibc
keeps freed blocks of up to 32 MiB, so that every phase of a step adds to the peak of resident memory."""
CPU_FIRST_STEP_BYTES = 70 * MIB
"""Bytes that the first step adds on a CPU: generated matrix kernels, threads of autograd and of gloo."""
CPU_SIGMA = 0.25
"""Relative standard deviation of a CPU rank's memory; it is large because libraries decide what memory they keep. Of
ten specs on two cores, eight needed at most 20 % more than predicted, one 36 % (``tests/bench/calibrated.py``)."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of the rank that needs most memory; every value is a column."""

    terms: dict[str, Column]
    """Bytes of device memory by key of :data:`partool.plan.terms.MEMORY_TERMS`."""
    sigma_bytes: Column
    """One standard deviation of the true peak around the total."""
    host_terms: dict[str, Column]
    """Bytes of host memory of one rank, by key of :data:`partool.plan.terms.HOST_TERMS`."""
    sharers: Column
    """Number of ranks that share the host memory of a node."""
    outside_bytes: Column
    """Bytes of context and communicators, the terms that the framework's allocator does not see."""
    idle_bytes: Column
    """Bytes beside the terms that the allocator holds for idle streams where the device has room for them. PyTorch's
    caching allocator frees such blocks and tries again before it raises an out-of-memory error
    (https://docs.pytorch.org/docs/stable/notes/cuda.html), so that they need not fit."""

    @cached_property
    def total_bytes(self) -> Column:
        """Bytes of all terms together, which have to fit into the device."""
        return sum(self.terms.values())

    @property
    def host_bytes(self) -> Column:
        """Bytes of host memory per node."""
        return sum(self.host_terms.values()) * self.sharers

    @classmethod
    def join(cls, pieces: list[Memory]) -> Memory:
        """Return the memory of all pieces' layouts, one piece after the other."""
        if len(pieces) == 1:
            return pieces[0]
        sizes = [np.size(piece.total_bytes) for piece in pieces]

        def joined(columns: list[Column]) -> Column:
            if not any(np.ndim(column) for column in columns):
                return columns[0]
            return np.concatenate([np.broadcast_to(each, size) for each, size in zip(columns, sizes, strict=True)])

        by_field = {name: [getattr(piece, name) for piece in pieces] for name in _COLUMNS}
        terms, host_terms = (
            {name: joined([getattr(piece, field)[name] for piece in pieces]) for name in getattr(pieces[0], field)}
            for field in ("terms", "host_terms")
        )
        return cls(terms=terms, host_terms=host_terms, **{name: joined(each) for name, each in by_field.items()})

    def of_fullest(self) -> Memory:
        """Return the memory of each layout's rank that needs most, from columns with a row for each rank.

        Of host memory, each term is the most of any rank.
        """
        total = np.asarray(self.total_bytes)
        ranks, worst = len(total), np.argmax(total, axis=0)

        def chosen(column: Column) -> Column:
            values = np.asarray(column)
            if values.ndim < 2:
                return column  # all ranks have the same
            if ranks == 1:
                return np.asarray(values[0])
            # A condition is faster than a choice among any number.
            return np.asarray(np.where(worst == 1, values[1], values[0]) if ranks == 2 else np.choose(worst, values))

        return Memory(
            terms={name: chosen(column) for name, column in self.terms.items()},
            host_terms={
                name: column if np.ndim(column) < 2 else np.max(column, axis=0)
                for name, column in self.host_terms.items()
            },
            **{name: chosen(getattr(self, name)) for name in _COLUMNS},
        )

    def of_each(self, count: int) -> list[Memory]:
        """Return the memory at each of ``count`` places of the columns, as single numbers."""

        def each(column: Column) -> list[Column]:
            return list(np.broadcast_to(np.asarray(column, dtype=float), count).tolist())

        terms, host = (
            [dict(zip(sizes, row, strict=True)) for row in zip(*map(each, sizes.values()), strict=True)]
            for sizes in (self.terms, self.host_terms)
        )
        rest = (self.sharers, self.outside_bytes, self.idle_bytes)
        columns = (terms, each(self.sigma_bytes), host, *map(each, rest))
        return [Memory(*row) for row in zip(*columns, strict=True)]


_COLUMNS = ("sigma_bytes", "sharers", "outside_bytes", "idle_bytes")
"""Fields of :class:`Memory` that are columns."""
_AT_ONCE = 4096
"""Number of layouts whose moments are compared at once: the columns of more would not stay in a core's cache."""


def peak_memory(job: TrainingWork, layouts: Layouts) -> Memory:
    """Return the predicted peak memory of each layout's fullest rank if layers are split evenly over stages.

    The first pipeline rank is evaluated as it has the most micro-batches in flight, the last as it has the head and the
    loss. Where dense layers come before expert layers, the second rank is evaluated too, as it has more parameters than
    the first.
    """
    if not layouts.shape:
        return peak_memory(job, layouts.with_columns(pp=np.atleast_1d(layouts.pp))).of_each(1)[0]
    places = _places(job, layouts)
    state, passes = parts(job, layouts, places)
    pieces = [slice(start, start + _AT_ONCE) for start in range(0, max(layouts.shape[0], 1), _AT_ONCE)]
    return Memory.join(
        [_memory(job, layouts.take(rows), state.of_rows(rows), passes.of_rows(rows)).of_fullest() for rows in pieces]
    )


def _places(job: TrainingWork, layouts: Layouts) -> tuple[Place, ...]:
    if np.max(layouts.pp) == 1:
        return ("last",)
    uneven = job.model.moe is not None and job.model.moe.first_dense_layers > 0
    return ("first", "last", "second") if uneven else ("first", "last")


def least_memory(job: TrainingWork, layouts: Layouts, *, keep: bool = True) -> Column:
    """Return bytes that :func:`peak_memory` exceeds: those of the training state in the optimizer's step.

    ``layouts`` has columns. The memory of activations takes most of the time of :func:`peak_memory`. ``keep`` is as in
    :func:`least_memory_of_passes`.
    """
    return _with_framework(job, least_state(job, layouts, _places(job, layouts), keep=keep))


def least_memory_of_passes(job: TrainingWork, layouts: Layouts, *, keep: bool = True) -> tuple[Column, Column]:
    """Return bytes that :func:`peak_memory` exceeds, by :func:`least_passes`, and bytes of host memory of a node.

    ``layouts`` has columns. Comparing all moments of a step takes most of the time of :func:`peak_memory`. Without
    ``keep``, a later call of :func:`peak_memory` computes everything again.
    """
    device, host = least_passes(job, layouts, _places(job, layouts), keep=keep)
    return _with_framework(job, device), host * np.minimum(layouts.world, job.devices.per_node)


def _with_framework(job: TrainingWork, least: Column) -> Column:
    """Return the bytes of a rank with ``least`` bytes of tensors and without communicators, or a few less."""
    least = FRAMEWORK_BYTES[job.devices.backend] + (1.0 + _fragmented(job)) * least
    return np.asarray(job.memory_scalar * least - len(MEMORY_TERMS))  # each term is rounded down


def _fragmented(job: TrainingWork) -> float:
    """Return the allocator's overhead as a share of everything allocated."""
    if job.devices.backend == "cpu":
        return CPU_FRAGMENTATION
    expandable = job.expandable_segments
    return memory_stack(job.stack.name).fragmentation if expandable is None else FRAGMENTATION[expandable]


def predict_memory(job: TrainingWork, layout: Layout, headroom: float) -> MemoryPrediction:
    """Return the predicted peak memory of one layout, computed exactly for each pipeline rank.

    ``headroom`` is the share of memory to keep free.
    """
    memories = rank_memories(job, layout)
    totals = [round(float(memory.total_bytes)) for memory in memories]
    worst = max(range(len(totals)), key=lambda rank: totals[rank])
    ranks = tuple(_rank_memory(rank, memory) for rank, memory in enumerate(memories))
    sigma = float(memories[worst].sigma_bytes)
    capacity = job.devices.memory_bytes
    probability = float(fit_probability(float(memories[worst].total_bytes), sigma, capacity))
    return MemoryPrediction(
        rank=worst * (layout.mesh.world_size // layout.mesh.pp),
        terms_bytes=ranks[worst].terms_bytes,
        total_bytes=ranks[worst].total_bytes,
        capacity_bytes=int(capacity * (1.0 - headroom)),
        fit_probability=round(probability, 6),
        sigma_bytes=round(sigma),
        idle_bytes=ranks[worst].idle_bytes,
        verdict=verdict(probability),
        ranks=ranks,
        **_host(job, memories, layout),
    )


def host_bytes(job: TrainingWork, layout: Layout) -> int:
    """Return the bytes of host memory that offloading takes on the fullest node."""
    return round(max(float(memory.host_bytes) for memory in rank_memories(job, layout)))


def _host(job: TrainingWork, memories: Sequence[Memory], layout: Layout) -> dict[str, Any]:
    """Return the fields of the prediction that describe the host memory of the rank that needs most host memory."""
    if not layout.offload.active:
        return {}
    most = max(memories, key=lambda memory: float(memory.host_bytes))
    terms = {name: round(float(size)) for name, size in most.host_terms.items()}
    return {
        "host_terms_bytes": {name: terms[name] for name in HOST_TERMS if terms.get(name)},
        "host_bytes": round(float(most.host_bytes)),
        "pinned_bytes": sum(terms.get(name, 0) for name in pinned_terms(job)),
    }


def rank_memories(job: TrainingWork, layout: Layout) -> list[Memory]:
    """Return, for each pipeline position, the peak memory of one rank."""
    return ranks_of(job, encode(layout), loads_of_layout(job, layout)).of_each(layout.mesh.pp)


def rank_moments(job: TrainingWork, layout: Layout) -> list[list[Moment]]:
    """Return, for each pipeline position, the moments of a step of one rank; all their fields are single numbers."""
    layouts, stack = encode(layout), memory_stack(job.stack.name)
    loads = loads_of_layout(job, layout)
    layers = bytes_of_layers(job, layouts, stack, [loads])
    candidates = _moments(
        job, layouts, stack, states(job, layouts, stack, loads), pass_bytes(job, layouts, stack, loads, layers)
    )
    each = [moment.of_each(layout.mesh.pp) for moment in candidates]
    return [list(rank) for rank in zip(*each, strict=True)]


def ranks_of(job: TrainingWork, layouts: Layouts, loads: RankLoad) -> Memory:
    """Return the peak memory of ranks with ``loads``; columns are those of ``layouts`` and of the loads."""
    stack = memory_stack(job.stack.name)
    layers = bytes_of_layers(job, layouts, stack, [loads])
    return _memory(job, layouts, states(job, layouts, stack, loads), pass_bytes(job, layouts, stack, loads, layers))


def _rank_memory(rank: int, memory: Memory) -> RankMemory:
    terms = {name: round(float(memory.terms[name])) for name in MEMORY_TERMS}
    total = sum(terms.values())
    return RankMemory(
        pipeline_rank=rank, terms_bytes=terms, total_bytes=total, idle_bytes=round(float(memory.idle_bytes))
    )


def _memory(job: TrainingWork, layouts: Layouts, state: States, passes: PassBytes) -> Memory:
    stack, backend = memory_stack(job.stack.name), job.devices.backend
    moment = (
        (_all_phases(state, passes, working_bytes(job, layouts)) if job.backward else all_phases(state, passes))
        if backend == "cpu"
        else fullest(_moments(job, layouts, stack, state, passes))
    )
    outside = FRAMEWORK_BYTES[backend] + communicators(job, layouts).memory_bytes(backend)
    optimizer, on_its_way = state.optimizer - state.average, 0.0 * state.optimizer
    if backend == "cpu":
        # A CPU has no other memory: state that would leave an accelerator stays in the same memory.
        optimizer = optimizer + state.host["masters"] + state.host["moments"] + state.host["copies"]
        on_its_way = sum(size for name, size in state.host.items() if name not in ("masters", "moments", "copies"))
        on_its_way = on_its_way + passes.on_host
    terms = {
        "parameters": state.parameters,
        "gathered": moment.gathered,
        "gradients": moment.gradients,
        "optimizer": optimizer,
        "average": state.average + 0.0 * state.optimizer,
        "activations": moment.activations,
        "loss": moment.loss,
        "communication": moment.communication + on_its_way + outside - FRAMEWORK_BYTES[backend],
        "framework": FRAMEWORK_BYTES[backend] + 0.0,
    }
    allocated = sum(terms.values()) - outside
    share = _fragmented(job)
    terms["fragmentation"] = allocated * share + (CPU_FIRST_STEP_BYTES if backend == "cpu" else moment.freed)
    terms = {name: np.floor(job.memory_scalar * terms[name]) for name in MEMORY_TERMS}
    host_terms = {**state.host, "activations": passes.on_host}
    outside = job.memory_scalar * outside
    sigma = _narrowed(job, _sigma(job, layouts, sum(terms.values()), outside), sum(terms.values()))
    sharers = np.minimum(layouts.world, job.devices.per_node)
    idle = np.floor(job.memory_scalar * moment.idle + 0.0 * allocated)
    return Memory(terms, sigma, host_terms, sharers, outside, idle)


def _sigma(job: TrainingWork, layouts: Layouts, total: Column, outside: Column) -> Column:
    """Return the standard deviation of the total in bytes, from runs of what the layouts use.

    partool's own code has at least the floor: its few measured runs on accelerators were all on one device.
    """
    if job.devices.backend == "cpu":
        return CPU_SIGMA * total
    least = MEMORY_FLOOR if memory_stack(job.stack.name).one_device_evidence else 0.0
    return memory_excess(job.stack.family, job.devices.architecture, layouts, least=least) * (total - outside)


def _narrowed(job: TrainingWork, sigma: Column, total: Column) -> Column:
    """Return the standard deviation in bytes after measured runs, which is at least 2 % of ``total``.

    ``sigma``, the standard deviation without measured runs, weighs as much as one run.
    """
    if not job.memory_runs:
        return sigma
    both = np.hypot(sigma, np.sqrt(job.memory_runs) * job.memory_spread * total) / np.sqrt(job.memory_runs + 1)
    return np.asarray(np.maximum(SMALLEST_ERROR * total, both))


def _moments(job: TrainingWork, layouts: Layouts, stack: MemoryStack, state: States, passes: PassBytes) -> list[Moment]:
    """Return the moments that may be the fullest; only of partool's runtime it is known what exists at each."""
    if not job.backward:
        return forward_moments(state, passes)
    if not stack.traced_moments:
        return plain_moments(state, passes)
    if not np.any(layouts.ring):
        return moments(job, layouts, state, passes)
    # Ranks that pass weights to each other neither gather nor reduce through FSDP2.
    cast_bytes = job.compute_bytes if job.compute_bytes != job.master_bytes else 0
    passing = ring_moments(state, passes, cast_bytes, working_bytes(job, layouts))
    if np.all(layouts.ring):
        return passing
    return [either(layouts.ring, fullest(passing), fullest(moments(job, layouts, state, passes)))]


def _all_phases(state: States, passes: PassBytes, working: Column) -> Moment:
    """Return the sum of all phases of a step, as blocks of a CPU's memory stay resident after they are freed."""
    return Moment(
        "all phases",
        gathered=state.gathered,
        gradients=state.gradients_at_step,
        activations=passes.saved + passes.backward_peak_bytes,
        loss=np.maximum(passes.loss, passes.loss_backward),
        communication=state.buffers + passes.exchanged + passes.copies + working,
    )
