"""The planner's steps in order: resolve and check, search, explain, build the plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partool.catalog.profile import Applied
from partool.diagnostics.record import Diagnostic
from partool.layout.capabilities import Gap
from partool.plan.layout import Layout
from partool.plan.schedule import sealed
from partool.plan.types import Finding, Plan, Prediction, TeacherModel
from partool.planner.data_counts import DataCounts, counts_of, left_out
from partool.planner.findings import fp8, unused
from partool.planner.findings.kernels import check_kernels, without_missing
from partool.planner.findings.stopping import check_decided, check_restarts, check_watchdog
from partool.planner.forms.runnable import gaps, of_engine, task
from partool.planner.hf import hf_model, module_record
from partool.planner.kernels.fused import fused
from partool.planner.problem import Problem, SearchBudget
from partool.planner.resolve import Resolved, resolve, spec_hash
from partool.planner.rules.distill import check_layout as check_layout_of_teacher
from partool.planner.rules.distill import partition_of_teacher
from partool.planner.rules.evaluation import resolve_evaluation
from partool.planner.rules.kernels import absolute
from partool.planner.rules.launching import environment
from partool.planner.rules.telemetry import check_profile, resolve_telemetry
from partool.planner.rules.tensor_cuts import partition
from partool.spec.adapter import AdapterSpec
from partool.spec.checks import check as check_spec
from partool.spec.model import Weights
from partool.spec.parallel import Compile
from partool.spec.patterns import FilePath, fits
from partool.spec.spec import Spec
from partool.spec.stand_ins import Rest, remaining
from partool.spec.training import CheckpointSpec, Fused, KernelsSpec
from partool.version import __version__
from partool.work.traced import Trace, TraceError, refresh

__all__ = ["TraceError", "traced"]


def traced(problem: Problem) -> Trace:
    """Return the trace of a problem's model; raises :class:`TraceError` if tracing fails or torch is missing."""
    compiles: tuple[Compile, ...] = ("block", "none") if problem.compiles_later else (problem.compile,)
    parts: dict[Compile, tuple[Fused, ...]] = {compile: fused(problem, compile) for compile in compiles}
    return refresh(problem.model, problem.spec.training.precision, compiles, parts)


if TYPE_CHECKING:
    from partool.planner.search.price import Priced
    from partool.planner.search.solve import Solution


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan, or None if the diagnostics contain errors; diagnostics carry paths in the spec, not line numbers."""

    plan: Plan | None
    diagnostics: list[Diagnostic]


def make_plan(
    spec: Spec,
    *,
    base_dir: Path,
    default_name: str,
    trace: bool = False,
    forgive: Collection[str] = (),
    budget: SearchBudget | None = None,
) -> PlanResult:
    """Plan a spec. Relative paths start from ``base_dir``; ``default_name`` names the plan if the spec does not.

    ``trace``: trace which tensors this model saves for the backward pass, instead of using the data that come with
    partool; needs torch. ``forgive``: codes of kernel rules whose errors become warnings, see
    :func:`partool.planner.findings.kernels.check_kernels`. ``budget``: the counter of priced rows, which another thread
    may read and a signal handler may stop. Never raises for bad input: errors are among the diagnostics. The same
    spec, catalog and machine give the same plan, unless the search is stopped.
    """
    if not fits(FilePath, str(base_dir)):  # paths of the plan begin with this folder
        message = f"the spec lies in {str(base_dir)!r}, a folder with a control character in its name"
        return PlanResult(None, [Diagnostic("PT106", message, help="rename the folder")])
    is_open = spec.adapter is not None and spec.adapter.kind == "auto"
    make = _tuned if is_open else _as_given
    try:
        result, used = make(spec, base_dir, default_name, trace=trace, budget=budget or SearchBudget())
    except TraceError as error:
        help = "partool plan without --trace uses the data that come with partool"
        return PlanResult(None, [Diagnostic("PT303", str(error), path=("model",), help=help)])
    return _checked(result, forgive, used)


def _as_given(
    spec: Spec, base_dir: Path, default_name: str, *, trace: bool, budget: SearchBudget
) -> tuple[PlanResult, Trace | None]:
    """Plan a spec that says how the model is tuned; return the trace that prices used, too."""
    resolved = resolve(spec, base_dir, budget)
    if resolved.problem is None:
        return PlanResult(None, [*resolved.diagnostics, *_beside(spec, resolved.diagnostics, base_dir)]), None
    problem = replace(resolved.problem, trace=traced(resolved.problem)) if trace else resolved.problem
    return _planned(spec, resolved, problem, base_dir, default_name), problem.trace


def _tuned(
    spec: Spec, base_dir: Path, default_name: str, *, trace: bool, budget: SearchBudget
) -> tuple[PlanResult, Trace | None]:
    """Plan a spec with ``adapter: auto``: the first way to tune the model of which a layout fits."""
    from partool.planner import tuning
    from partool.planner.explain import changes
    from partool.planner.search.solve import solve

    assert spec.adapter is not None, "no adapter"
    too_large: list[tuning.Tried] = []
    findings: list[Diagnostic] = []
    for way in tuning.ways(spec.adapter):
        wanted = tuning.with_way(spec, way)
        resolved = resolve(wanted, base_dir, budget)
        findings = resolved.diagnostics
        if resolved.problem is None:
            return PlanResult(None, [*findings, *_beside(wanted, findings, base_dir)]), None
        problem = replace(resolved.problem, trace=traced(resolved.problem)) if trace else resolved.problem
        solution = solve(problem)
        tried = tuning.tried(way, problem, solution)
        if tried is None:
            return PlanResult(None, [*findings, changes.no_layout(solution)]), None
        if tried.step_s is not None:
            result = _planned(wanted, resolved, problem, base_dir, default_name, solution)
            return _as_written(result, spec, tuning.reason(too_large, tried)), problem.trace
        too_large.append(tried)
    return PlanResult(None, [*findings, tuning.nothing_fits(too_large)]), None


def _as_written(result: PlanResult, spec: Spec, reason: str) -> PlanResult:
    """Return a plan whose adapter the planner chose for a ``reason``, with the spec that the user wrote."""
    plan = result.plan
    if plan is None:
        return result
    update = {
        "reasons": (reason, *plan.reasons),
        "inputs": {**plan.inputs, "spec": spec_hash(spec)},
        "spec": spec.model_dump(mode="json", exclude_defaults=True),
    }
    return PlanResult(plan.model_copy(update=update), result.diagnostics)


def check_rest(rest: Rest, base_dir: Path, seen: Iterable[Diagnostic] = ()) -> list[Diagnostic]:
    """Return what can be found in a spec before the search, without what follows from its refused values.

    Findings in ``seen`` are left out.
    """
    return remaining(rest, lambda spec: [*check_spec(spec), *resolve(spec, base_dir).diagnostics], seen)[1]


def _beside(spec: Spec, findings: list[Diagnostic], base_dir: Path) -> list[Diagnostic]:
    """Return the findings that do not depend on the errors found before the search."""
    errors = {finding.path for finding in findings if finding.severity == "error"}
    rest = Rest(spec.model_dump(mode="json", exclude_unset=True)).without(errors)
    return check_rest(rest, base_dir, findings)


def _planned(  # noqa: PLR0917 - one step of make_plan
    spec: Spec,
    resolved: Resolved,
    problem: Problem,
    base_dir: Path,
    default_name: str,
    solution: Solution | None = None,
) -> PlanResult:
    """Search the problem's layouts, unless ``solution`` has the result, and build the plan."""
    from partool.planner.explain import reasons
    from partool.planner.explain.batches import awkward_batch
    from partool.planner.explain.fewer import fewer_are_as_fast
    from partool.planner.findings import saves
    from partool.planner.findings.offload_room import check_layout
    from partool.planner.findings.pod_network import check_pod_network
    from partool.planner.search.solve import solve
    from partool.planner.stopping import decided, forecast

    findings = resolved.diagnostics
    solution = solution or solve(problem)
    best = solution.chosen
    if best is None:
        from partool.planner.explain import changes

        finding = changes.does_not_fit(solution) if solution.space.size else changes.no_layout(solution)
        return PlanResult(None, [*findings, finding])
    missing = [*of_engine(spec.engine), *gaps(task(problem), best.layout)]
    findings += [_gap(gap) for gap in missing]
    findings += [*unused.gathers(problem, best.layout), *unused.tensor(problem, best.layout)]
    wide = [*fp8.stay_wide(problem, best.layout), *check_layout(problem, best)]
    findings += wide
    if _failed(wide):
        return PlanResult(None, findings)
    findings += check_pod_network(problem, best, resolved.launch)
    cut = partition(problem, best.layout)
    findings += [finding for finding in cut.findings if finding not in findings]
    if _failed(list(cut.findings)):
        return PlanResult(None, findings)
    uncut = list(check_layout_of_teacher(problem, best.layout))
    findings += uncut
    if _failed(uncut):
        return PlanResult(None, findings)
    counts = counts_of(problem.spec, resolved.data)
    findings += left_out(counts, resolved.data)
    fields = _predictions_and_reasons(solution, best, resolved, counts)
    findings += reasons.tight(solution, best)
    findings += fewer_are_as_fast(problem, best)
    findings += awkward_batch(problem, best, solution.plain)
    plan = Plan(
        partool_version=__version__,
        job=spec.job,
        name=spec.name or default_name,
        model=problem.model,
        model_source=resolved.model_source,
        hf=hf_model(spec, problem.described, base_dir),
        module=module_record(spec, problem.described, base_dir),
        generation=resolved.generation,
        weights=_weights(spec, base_dir),
        frozen=problem.frozen,
        adapter=_adapter(spec, base_dir),
        teacher=_teacher(problem, resolved.teacher, best.layout),
        devices=problem.devices,
        layout=sealed(best.layout),
        partition=cut.rows,
        training=problem.spec.training,
        optimizer=problem.optimizer,
        data=resolved.data,
        kernels=_kernels(spec, base_dir),
        checkpoint=_checkpoint(spec, base_dir),
        resume=spec.resume,
        launch=resolved.launch,
        evaluation=resolve_evaluation(spec.evaluation, base_dir),
        telemetry=resolve_telemetry(spec.telemetry, base_dir),
        environment=environment(resolved.launch, problem.devices),
        runnable=not missing,
        not_runnable=tuple(gap.code for gap in missing),
        spec=spec.model_dump(mode="json", exclude_defaults=True),
        **fields,
    )
    about_saves: list[Diagnostic] = []
    if problem.job.backward:
        plan, about_saves = saves.with_decided_mode(plan)
    plan = decided(plan)
    limits = [*about_saves, *check_profile(plan), *check_decided(plan.launch, forecast(plan))]
    limits += [*check_watchdog(plan.launch, plan.prediction.upper_step_s), *check_restarts(plan)]
    findings += limits
    recorded = tuple(Finding(code=f.code, message=f.message) for f in findings)
    return PlanResult(None if _failed(limits) else plan.model_copy(update={"findings": recorded}), findings)


def _checked(result: PlanResult, forgive: Collection[str], trace: Trace | None) -> PlanResult:
    """Return ``result`` with the findings of rules that check whole plans; if any is an error, the plan is None."""
    plan = result.plan
    if plan is None:
        return result
    findings = [*_elastic(plan, trace), *check_kernels(plan, forgive)]
    if "PT492" in forgive:
        plan = plan.model_copy(update={"kernels": without_missing(plan.kernels)})
    return PlanResult(None if _failed(findings) else plan, [*result.diagnostics, *findings])


def _elastic(plan: Plan, trace: Trace | None) -> list[Diagnostic]:
    if plan.launch.min_nodes is None or trace is None:
        return []
    from partool.planner.elastic import check_elastic

    return check_elastic(plan, trace)


def _predictions_and_reasons(
    solution: Solution, best: Priced, resolved: Resolved, counts: DataCounts
) -> dict[str, Any]:
    """Return the fields of a plan that hold predictions, alternatives and reasons."""
    from partool.cost.training.saved import saved_state
    from partool.planner.explain import answers, candidates, choice, comparison, errors, limits, reasons
    from partool.planner.explain.fewer import fewer_devices
    from partool.planner.explain.scored import score_of
    from partool.planner.totals import reference_pass, time_of_one_reading, totals, validation_s, with_reference_pass

    measured = resolved.measured or Applied(solution.problem.devices)
    saved = saved_state(best.job, best.layout)
    fewer = fewer_devices(solution.problem)
    others = comparison.rows(solution, best, fewer)
    reference = reference_pass(solution.problem, best, counts)
    predicted = with_reference_pass(best.time, reference, best.layout.mesh.world_size)
    if not solution.problem.job.backward:
        predicted = time_of_one_reading(solution.problem, best.time, counts)
    time, memory = errors.time_evidence(best, measured), errors.memory_evidence(best, measured)
    first = errors.first_run_of(best, measured)
    prediction = Prediction(
        memory=best.memory.model_copy(update=saved._asdict()),
        time=predicted,
        relative_error=time.error,
        relative_error_below=time.below,
        evidence=time.words,
        first_run_slowdown=first.slowdown,
        first_run_evidence=first.words,
        memory_error=memory.error,
        memory_evidence=memory.words,
        time_scalar=measured.time_scalar,
        memory_scalar=measured.memory_scalar,
        score=score_of(best),
        totals=totals(
            solution.problem,
            best.layout,
            predicted,
            counts,
            saved.saved_bytes,
            reference=reference,
            validation_s=validation_s(solution.problem, best),
        ),
    )
    table, searched = candidates.candidates(solution, best, fewer), solution.summary()
    without, limit = tuple(choice.comparisons(solution, best)), limits.limit(solution, best)
    compared = answers.Compared(without, others, limit)
    return {
        "prediction": prediction,
        "alternatives": comparison.alternatives(best, others),
        "candidates": table,
        "search": searched,
        "answers": answers.answers(solution, best, compared, prediction),
        "limit": limit.sentence,
        "reasons": (
            *reasons.reasons(solution, best, searched, without, limit),
            *errors.sentences(best, prediction),
            *reasons.details(solution, best),
            *([measured.reason] if measured.reason else []),
        ),
        "inputs": {**resolved.inputs, "cost/trace": solution.problem.trace.sha256},
    }


def _failed(findings: list[Diagnostic]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def _gap(gap: Gap) -> Diagnostic:
    message = f"the runtime does not run {gap.what}; this plan can be read, not launched"
    if gap.path == ("engine",):  # as the spec asks
        return Diagnostic(gap.code, message, severity="note", path=gap.path, help="partool render writes its files")
    return Diagnostic(
        gap.code, message, severity="warning", path=gap.path, help=f"partool explain {gap.code} says what runs"
    )


def _weights(spec: Spec, base_dir: Path) -> Weights:
    weights = spec.model.weights
    if weights.source == "hf" and weights.path is None and spec.model.hf is not None:
        weights = weights.model_copy(update={"path": spec.model.hf})
    return weights.model_copy(update={"path": str(base_dir / weights.path)}) if weights.path else weights


def _adapter(spec: Spec, base_dir: Path) -> AdapterSpec | None:
    adapter = spec.adapter
    if adapter is None or adapter.weights is None:
        return adapter
    return adapter.model_copy(update={"weights": str(base_dir / adapter.weights)})


def _teacher(problem: Problem, teacher: TeacherModel | None, layout: Layout) -> TeacherModel | None:
    """Return the teacher of a training with the parts of its parameters that tensor ranks hold."""
    if teacher is None or not problem.job.backward:
        return None
    return teacher.model_copy(update={"partition": partition_of_teacher(problem, teacher.model, layout).rows})


def _checkpoint(spec: Spec, base_dir: Path) -> CheckpointSpec:
    checkpoint = spec.checkpoint
    return checkpoint.model_copy(update={"dir": str(base_dir / checkpoint.dir)}) if checkpoint.dir else checkpoint


def _kernels(spec: Spec, base_dir: Path) -> KernelsSpec:
    tuned = [str(absolute(path, base_dir)) for path in spec.kernels.tuned]
    return spec.kernels.model_copy(update={"tuned": tuned})
