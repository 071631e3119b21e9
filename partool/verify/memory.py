"""Corrects a plan's predicted memory by the memory that its ranks held in a dry run."""

from __future__ import annotations

from partool.cost.memory.fit import fit_probability, verdict
from partool.cost.training.communicators import Communicators
from partool.plan.rank_trace import COMPUTE, MemoryTrace, RankTrace
from partool.plan.terms import MEMORY_TERMS
from partool.plan.types import MemoryPrediction, Plan, RankMemory
from partool.verify.findings import MESSAGES

OF_TENSORS = ("parameters", "gathered", "gradients", "optimizer", "average", "activations", "loss", "communication")
"""Memory terms of tensors; a dry run does not see the other terms."""
_IN_ACTIVATIONS = ("working",)
"""Terms of a dry run that the planner counts as activations."""


def pipeline_rank(plan: Plan, rank: int) -> int:
    """Return the position in its pipeline of a global rank."""
    mesh = plan.layout.mesh
    return rank // (mesh.world_size // mesh.pp)


def corrected(plan: Plan, traces: tuple[RankTrace, ...]) -> MemoryPrediction:
    """Return the prediction with the terms of tensors as executed; of each pipeline rank, the fullest executed one.

    The bytes outside of tensors are those of the planner, but for the communicators, which are counted from the groups
    that the step uses, and the caching allocator's overhead, which is modelled from the step's allocations. The
    standard deviation stays, as kernels and libraries did not run.
    """
    old = plan.prediction.memory
    ranks = {memory.pipeline_rank: memory for memory in old.ranks}
    best: dict[int, tuple[int, RankMemory]] = {}
    for trace in traces:
        place = pipeline_rank(plan, trace.rank)
        if trace.memory is None or place not in ranks:
            continue
        memory = _rank_memory(plan, trace, trace.memory, ranks[place])
        if place not in best or memory.total_bytes > best[place][1].total_bytes:
            best[place] = trace.rank, memory
    if not best:
        return old
    rank, fullest = max(best.values(), key=lambda each: each[1].total_bytes)
    likely = float(fit_probability(fullest.total_bytes, old.sigma_bytes, plan.devices.memory_bytes))
    return old.model_copy(
        update={
            "rank": rank,
            "terms_bytes": fullest.terms_bytes,
            "total_bytes": fullest.total_bytes,
            "idle_bytes": fullest.idle_bytes,
            "fit_probability": round(likely, 6),
            "verdict": verdict(likely),
            "ranks": tuple(best[place][1] if place in best else ranks[place] for place in sorted(ranks)),
        }
    )


def _rank_memory(plan: Plan, trace: RankTrace, memory: MemoryTrace, predicted: RankMemory) -> RankMemory:
    terms = {name: memory.terms_bytes.get(name, 0) for name in OF_TENSORS}
    terms["activations"] += sum(memory.terms_bytes.get(name, 0) for name in _IN_ACTIVATIONS)
    terms["communication"] += communicator_bytes(plan, trace)
    terms["framework"] = predicted.terms_bytes["framework"]
    empty = max(0, memory.reserved_bytes - memory.peak_bytes)
    idle = min(predicted.idle_bytes, empty)
    terms["fragmentation"] = empty - idle
    if plan.devices.backend == "cpu":
        terms["fragmentation"], idle = predicted.terms_bytes["fragmentation"], 0
    return RankMemory(
        pipeline_rank=predicted.pipeline_rank,
        terms_bytes={name: terms[name] for name in MEMORY_TERMS},
        total_bytes=sum(terms.values()),
        idle_bytes=idle,
    )


def communicator_bytes(plan: Plan, trace: RankTrace) -> int:
    """Return the bytes of the communicators that a rank's step uses, which the framework's allocator does not see."""
    kinds: dict[tuple[tuple[int, ...], str], set[str]] = {}
    used = {trace.vocabulary[index] for index in set(trace.order) if index != COMPUTE}
    for each in used:
        if len(each.group) > 1:
            kinds.setdefault((each.group, each.purpose), set()).add(each.kind)
    wires = {use for use, of in kinds.items() if of <= set(MESSAGES)}
    pairs = sum(len(group) == 2 for group, purpose in kinds if (group, purpose) not in wires)
    counted = Communicators(len(kinds) - len(wires), len(wires), pairs)
    return int(counted.memory_bytes(plan.devices.backend))
