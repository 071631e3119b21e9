"""Verifies a plan: dry-runs the ranks that differ, checks their exchanges, and corrects the predicted memory."""

from __future__ import annotations

from collections.abc import Callable

from partool.plan.rank_trace import RankTrace
from partool.plan.types import Plan
from partool.plan.verification import NOT_EXECUTED, UNCOMPILED, Verification, VerifiedFinding, VerifiedRank
from partool.verify.execute import execute
from partool.verify.findings import ExchangeFinding
from partool.verify.matching import mismatches
from partool.verify.memory import corrected, pipeline_rank
from partool.verify.ranks import differing_ranks
from partool.verify.waits import stuck


def verified(plan: Plan, told: Callable[[str], None] = lambda line: None) -> Plan:
    """Return the plan with its verification, and with the memory that its ranks hold in a dry run.

    ``told`` is called with a line on the work that begins. Raises :class:`partool.verify.DryRunError`.
    """
    ranks, world = differing_ranks(plan), plan.layout.mesh.world_size
    told(f"dry run of {len(ranks)} of {world} ranks" if len(ranks) < world else f"dry run of all {world} ranks")
    traces = execute(plan, ranks)
    # Ranks whose exchanges do not meet also wait for each other: one finding for one fault is enough.
    found = mismatches(plan, traces) or stuck(plan, traces)
    prediction = plan.prediction.model_copy(update={"memory": corrected(plan, traces)})
    return plan.model_copy(update={"prediction": prediction, "verification": _verification(plan, traces, found)})


def _verification(plan: Plan, traces: tuple[RankTrace, ...], found: list[ExchangeFinding]) -> Verification:
    fullest = max(traces, key=lambda trace: trace.memory.peak_bytes if trace.memory else 0)
    place, memory = pipeline_rank(plan, fullest.rank), fullest.memory
    predicted = next((each.terms_bytes for each in plan.prediction.memory.ranks if each.pipeline_rank == place), None)
    compiled = plan.layout.compile != "none"
    return Verification(
        not_executed=f"{NOT_EXECUTED}; {UNCOMPILED}" if compiled else NOT_EXECUTED,
        ranks=tuple(_rank(plan, trace) for trace in traces),
        findings=tuple(_finding(each) for each in found),
        predicted_bytes=predicted or plan.prediction.memory.terms_bytes,
        fullest=fullest.rank,
        owners=memory.owners if memory else (),
        timeline=memory.timeline if memory else (),
    )


def _rank(plan: Plan, trace: RankTrace) -> VerifiedRank:
    memory = trace.memory
    return VerifiedRank(
        rank=trace.rank,
        pipeline_rank=pipeline_rank(plan, trace.rank),
        peak_bytes=memory.peak_bytes if memory else 0,
        terms_bytes=memory.terms_bytes if memory else {},
        reserved_bytes=memory.reserved_bytes if memory else 0,
        exchanges=sum(1 for _ in trace.collectives),
        operators=trace.operators,
        seconds=trace.seconds,
    )


def _finding(found: ExchangeFinding) -> VerifiedFinding:
    places = tuple(".".join(place) for place in found.places)
    return VerifiedFinding(code=found.code, message=found.message, places=places, ranks=found.ranks)
