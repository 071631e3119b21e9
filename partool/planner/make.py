"""The planner, read top to bottom: resolve, check, search, explain, write the plan down."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from partool import __version__
from partool.catalog.hardware import resolve_hardware
from partool.catalog.lookup import table_hash
from partool.catalog.models import resolve_model
from partool.cost.step import RELATIVE_ERROR
from partool.diagnostics.record import Diagnostic
from partool.layout.capabilities import gaps
from partool.plan.types import Finding, Plan, Prediction
from partool.planner import explain
from partool.planner.candidates import Candidate, Problem, candidates, needs, price
from partool.planner.checks import check
from partool.planner.data import resolve_data
from partool.spec.model import Weights
from partool.spec.spec import Spec
from partool.spec.training import CheckpointSpec


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan, or None where the diagnostics hold errors; diagnostics carry paths, no positions."""

    plan: Plan | None
    diagnostics: list[Diagnostic]


def make_plan(spec: Spec, *, base_dir: Path, default_name: str) -> PlanResult:
    """Plan a spec. ``base_dir`` is what relative paths in it start from, ``default_name`` the name of a nameless spec.

    Never raises for bad input: what is wrong is among the diagnostics. The same spec, catalog and machine give the
    same plan.
    """
    data, tokenizer_vocab, found = resolve_data(spec, base_dir)
    model = resolve_model(spec.model, base_dir, tokenizer_vocab)
    hardware = resolve_hardware(spec.hardware, spec.training.precision, spec.limits.max_devices)
    found = [*found, *model.diagnostics, *hardware.diagnostics]
    if model.config is None or hardware.devices is None:
        return PlanResult(None, found)
    problem = Problem(spec, model.config, hardware.devices)
    found += check(problem, tokenizer_vocab)
    if _failed(found):
        return PlanResult(None, found)
    priced = sorted((price(problem, layout) for layout in candidates(problem)), key=_preference)
    best = next((candidate for candidate in priced if candidate.fits), None)
    if best is None:
        return PlanResult(None, [*found, explain.does_not_fit(problem, priced)])
    missing = gaps(needs(problem, best.work.layout))
    found += [_gap(code, what, path) for code, what, path in ((gap.code, gap.what, gap.path) for gap in missing)]
    found += explain.tight(problem, best)
    plan = Plan(
        partool_version=__version__,
        name=spec.name or default_name,
        model=model.config,
        model_source=model.source,
        weights=_weights(spec, base_dir),
        frozen=tuple(spec.model.frozen),
        devices=hardware.devices,
        layout=best.work.layout,
        training=spec.training,
        optimizer=spec.optimizer,
        data=data,
        kernels=spec.kernels,
        checkpoint=_checkpoint(spec, base_dir),
        launch=spec.launch,
        prediction=Prediction(
            memory=best.memory, time=best.time, relative_error=RELATIVE_ERROR[hardware.devices.backend]
        ),
        alternatives=explain.alternatives(problem, best, priced),
        reasons=explain.reasons(problem, best, priced),
        findings=tuple(Finding(code=f.code, message=f.message) for f in found),
        runnable=not missing,
        not_runnable=tuple(gap.code for gap in missing),
        spec=spec.model_dump(mode="json", exclude_defaults=True),
        inputs=_inputs(spec, model.inputs),
    )
    return PlanResult(plan, found)


def _failed(found: list[Diagnostic]) -> bool:
    return any(finding.severity == "error" for finding in found)


def _preference(candidate: Candidate) -> tuple[bool, bool, float, int, int]:
    """Order layouts: safe, then fitting ones; by time to a tenth of a percent; the simpler; the smaller."""
    time_s, memory = candidate.time.step_time_s, candidate.memory.total_bytes
    return not candidate.fits, not candidate.safe, float(f"{time_s:.3e}"), candidate.work.layout.zero, memory


def _gap(code: str, what: str, path: tuple[str, ...]) -> Diagnostic:
    message = f"the runtime does not run {what} yet; this plan can be read, not launched"
    return Diagnostic(code, message, severity="warning", path=path, help=f"partool explain {code} says what runs")


def _weights(spec: Spec, base_dir: Path) -> Weights:
    weights = spec.model.weights
    return weights.model_copy(update={"path": str(base_dir / weights.path)}) if weights.path else weights


def _checkpoint(spec: Spec, base_dir: Path) -> CheckpointSpec:
    checkpoint = spec.checkpoint
    return checkpoint.model_copy(update={"dir": str(base_dir / checkpoint.dir)}) if checkpoint.dir else checkpoint


def _inputs(spec: Spec, model_inputs: dict[str, str]) -> dict[str, str]:
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    inputs = {"spec": hashlib.sha256(text.encode()).hexdigest(), "catalog/accelerators": table_hash("accelerators")}
    return {**inputs, "catalog/fabrics": table_hash("fabrics"), **model_inputs}
