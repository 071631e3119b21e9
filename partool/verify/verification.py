"""Verifies a plan: dry-runs the ranks that differ, checks their exchanges, and corrects the predicted memory."""

from __future__ import annotations

from collections.abc import Callable

from partool.plan.rank_trace import RankTrace
from partool.plan.types import Plan
from partool.plan.verification import (
    NOT_EXECUTED,
    RANK_LIMIT_S,
    UNFUSED,
    MemoryBefore,
    Verification,
    VerifiedFinding,
    VerifiedRank,
)
from partool.verify.checkpoint import CheckpointFault, checkpoint_faults
from partool.verify.excess import excesses, kept, predicted_bytes
from partool.verify.execute import DryProgress, execute
from partool.verify.findings import ExchangeFinding
from partool.verify.matching import mismatches
from partool.verify.memory import corrected, pipeline_rank
from partool.verify.ranks import differing_ranks
from partool.verify.waits import stuck
from partool.version import __version__


def verified(
    plan: Plan,
    report: Callable[[str], None] = lambda line: None,
    progress: DryProgress | None = None,
    limit_s: float = RANK_LIMIT_S,
) -> Plan:
    """Return the plan with its verification, and with the memory that its ranks hold in a dry run.

    ``report`` is called with a line on the work that begins; for ``progress`` and ``limit_s`` see :func:`execute`.
    Raises :class:`partool.verify.DryRunError`.
    """
    before = plan.verification
    if before is not None and (before.plan_hash, before.partool_version) == (plan.hash, __version__):
        report("the plan holds its dry run; nothing of it has changed since")
        return plan
    ranks, world = differing_ranks(plan), plan.layout.mesh.world_size
    report(f"dry run of {len(ranks)} of {world} ranks" if len(ranks) < world else f"dry run of all {world} ranks")
    traces = execute(plan, ranks, progress, limit_s)
    faults = findings(plan, traces)
    memory = corrected(plan, traces)
    fullest = next(trace for trace in traces if trace.rank == memory.rank)
    verification = _verification(plan, traces, fullest, faults)
    prediction = plan.prediction.model_copy(update={"memory": memory})
    return plan.model_copy(update={"prediction": prediction, "verification": verification})


def findings(plan: Plan, traces: tuple[RankTrace, ...]) -> list[VerifiedFinding]:
    """Return what is wrong with the executed ranks of a plan, whose memory is still the planner's."""
    verified_findings = [_finding(each) for each in _exchanges(plan, traces)]
    verified_findings += [_finding(each, "in an evaluation, ") for each in _exchanges(plan, _of_evaluations(traces))]
    if len(traces) == plan.layout.mesh.world_size and all(trace.checkpoint for trace in traces):
        # Only all ranks together hold every part of the training state.
        verified_findings += [_of_checkpoint(fault) for fault in checkpoint_faults(plan, traces)]
    return [*verified_findings, *kept(traces), *excesses(plan, traces)]


def _exchanges(plan: Plan, traces: tuple[RankTrace, ...]) -> list[ExchangeFinding]:
    """Return faults of the ranks' exchanges; ranks whose exchanges do not meet would also wait for each other."""
    return mismatches(plan, traces) or stuck(plan, traces)


def _of_evaluations(traces: tuple[RankTrace, ...]) -> tuple[RankTrace, ...]:
    return tuple(trace.model_copy(update={"order": trace.evaluation_order}) for trace in traces)


def _verification(
    plan: Plan, traces: tuple[RankTrace, ...], fullest: RankTrace, faults: list[VerifiedFinding]
) -> Verification:
    memory, before = fullest.memory, plan.prediction.memory
    compiled = plan.layout.compile != "none"
    return Verification(
        not_executed=f"{NOT_EXECUTED}; {UNFUSED}" if compiled else NOT_EXECUTED,
        ranks=tuple(_rank(plan, trace) for trace in traces),
        findings=tuple(faults),
        partool_version=__version__,
        plan_hash=plan.hash,
        predicted_bytes=dict(predicted_bytes(plan, fullest)),
        before=MemoryBefore(
            rank=before.rank,
            total_bytes=before.total_bytes,
            fit_probability=before.fit_probability,
            verdict=before.verdict,
        ),
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
        executed=trace.executed,
    )


def _finding(exchange: ExchangeFinding, where: str = "") -> VerifiedFinding:
    places = tuple(".".join(place) for place in exchange.places)
    return VerifiedFinding(
        code=exchange.code, message=f"{where}{exchange.message}", places=places, ranks=exchange.ranks
    )


def _of_checkpoint(fault: CheckpointFault) -> VerifiedFinding:
    return VerifiedFinding(code="PT695", message=fault.message, places=("checkpoint",), ranks=fault.ranks)
