"""Compares the memory that ranks held in a dry run with the plan: what a step keeps, and what is held too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from partool.cost.training.moments import VARYING
from partool.cost.training.peak import rank_moments
from partool.plan.rank_trace import MemoryOwner, MemoryTrace, RankTrace
from partool.plan.types import Plan
from partool.plan.verification import VerifiedFinding
from partool.planner.elastic import job_of_plan
from partool.spec.numbers import GIB, MIB
from partool.verify.memory import communicator_bytes, pipeline_rank

GROUPS: tuple[tuple[str, ...], ...] = (
    ("parameters", "gathered"),
    ("optimizer",),
    ("average",),
    ("communication",),
    ("activations", "gradients", "loss", "working"),
)
"""Memory terms that are compared together. The planner gives the terms of one moment, the one with most memory: with
activations go gradients and the loss, of which a later moment may hold more and an earlier one less."""
SHARE = 0.15
"""Share of the planned bytes by which a group of terms may exceed them."""
LEAST_BYTES = 16 * MIB
"""Bytes by which a group of terms may exceed the planned ones: small tensors that no equation counts."""
_NAMED = 3
"""Number of owners of tensors that a finding names."""
_SECTIONS = {
    "parameters": "model",
    "gathered": "parallel.data",
    "gradients": "parallel.data",
    "optimizer": "optimizer",
    "average": "training.ema",
    "communication": "parallel",
    "loss": "kernels",
}
"""Memory term → section of the spec that decides on it; of all others ``parallel.recompute``."""


def excesses(plan: Plan, traces: Sequence[RankTrace]) -> list[VerifiedFinding]:
    """Return a finding PT697 for each group of terms, at the executed rank that exceeds its plan by most."""
    findings = []
    for group in GROUPS:
        over = [(_excess_bytes(plan, trace, group), -trace.rank, trace) for trace in traces if trace.memory is not None]
        excess_bytes, _, trace = max(over, key=lambda each: each[:2], default=(0, 0, None))
        if trace is not None and trace.memory is not None and excess_bytes > 0:
            findings.append(_finding(plan, trace, trace.memory, group, excess_bytes))
    return findings


def kept(traces: Sequence[RankTrace]) -> Iterator[VerifiedFinding]:
    """Yield a finding PT696 for each rank that holds more after a step than before it."""
    for trace in traces:
        if trace.memory is not None and trace.memory.leaked_bytes > 0:
            size = f"{trace.memory.leaked_bytes:,} bytes"
            message = f"rank {trace.rank} holds {size} more after a step than before it{_most(trace.memory.leaked)}"
            yield _owners_finding("PT696", message, trace.rank, trace.memory.leaked)


def predicted_bytes(plan: Plan, trace: RankTrace) -> Mapping[str, int]:
    """Return the planned terms of the rank's position; of communication without communicators, which are no tensors."""
    place = pipeline_rank(plan, trace.rank)
    terms = dict(next((each.terms_bytes for each in plan.prediction.memory.ranks if each.pipeline_rank == place), {}))
    if terms:
        terms["communication"] = max(0, terms["communication"] - communicator_bytes(plan, trace))
    return terms


def _excess_bytes(plan: Plan, trace: RankTrace, group: Sequence[str]) -> int:
    """Return by how many bytes a group of terms exceeds its plan; 0 within the bounds."""
    planned = predicted_bytes(plan, trace)
    if trace.memory is None or not planned:
        return 0
    planned_bytes = max(sum(planned.get(term, 0) for term in group), _most_planned(plan, trace, group))
    over_bytes = sum(trace.memory.terms_bytes.get(term, 0) for term in group) - planned_bytes
    return over_bytes if over_bytes > max(LEAST_BYTES, SHARE * planned_bytes) else 0


def _most_planned(plan: Plan, trace: RankTrace, group: Sequence[str]) -> int:
    """Return the most bytes of a group at any moment that the planner knows: peaks of two moments may be as high."""
    if plan.layout.pipeline.schedule == "file":
        return 0
    moments = rank_moments(job_of_plan(plan, plan.devices), plan.layout)[pipeline_rank(plan, trace.rank)]
    terms = [term for term in group if term in VARYING]
    fixed = sum(predicted_bytes(plan, trace).get(term, 0) for term in group if term not in VARYING)
    return fixed + max(sum(int(getattr(moment, term)) for term in terms) for moment in moments)


def _finding(
    plan: Plan, trace: RankTrace, memory: MemoryTrace, group: Sequence[str], excess_bytes: int
) -> VerifiedFinding:
    planned = predicted_bytes(plan, trace)
    parts = [("loss", "working")] + [(term,) for term in group if term not in ("loss", "working")]
    most = max(parts, key=lambda part: sum(memory.terms_bytes.get(each, 0) - planned.get(each, 0) for each in part))
    owners = [owner for owner in memory.owners if owner.term in most]
    held_bytes = sum(memory.terms_bytes.get(term, 0) for term in group)
    names = [term for term in group if memory.terms_bytes.get(term)]
    names = [term for term in names if term != "working"] or names
    message = (
        f"rank {trace.rank} holds {held_bytes / GIB:.2f} GiB of {', '.join(names)} at its peak, "
        f"{excess_bytes / GIB:.2f} GiB more than planned{_most(owners)}"
    )
    return _owners_finding("PT697", message, trace.rank, owners)


def _owners_finding(code: str, message: str, rank: int, owners: Sequence[MemoryOwner]) -> VerifiedFinding:
    places = dict.fromkeys(_SECTIONS.get(owner.term, "parallel.recompute") for owner in owners[:_NAMED])
    return VerifiedFinding(code=code, message=message, places=tuple(places), ranks=(rank,))


def _most(owners: Sequence[MemoryOwner]) -> str:
    """Return whose tensors hold most, in words."""
    if not owners:
        return ""
    return f"; most in {', '.join(f'{each.name} ({each.term}, {_size(each)})' for each in owners[:_NAMED])}"


def _size(owner: MemoryOwner) -> str:
    return f"{owner.tensors} × {owner.size_bytes / owner.tensors / MIB:.4g} MiB"
