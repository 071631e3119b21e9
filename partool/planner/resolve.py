"""Looks up the model, machines and data of a spec, and checks that they go together."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from partool.catalog.hardware import resolve_hardware
from partool.catalog.lookup import table_hash
from partool.catalog.models import ResolvedModel, resolve_model
from partool.catalog.profile import Applied, apply_profile
from partool.catalog.silicon.collectives import measured_device
from partool.catalog.silicon.grid import FAMILIES, family_hash
from partool.diagnostics.record import Diagnostic
from partool.plan.types import Generation, TeacherModel
from partool.planner.adapters import priced_adapter
from partool.planner.data_counts import with_steps
from partool.planner.described import Description
from partool.planner.hf import narrowed, unused_weights, with_graph
from partool.planner.problem import Problem, SearchBudget
from partool.planner.rules import adversarial, distill
from partool.planner.rules.data import resolve_data
from partool.planner.rules.engine import with_engine_defaults
from partool.planner.rules.evaluation import check_files
from partool.planner.rules.kernels import table_hashes
from partool.planner.rules.launching import resolve_launch, within_cores
from partool.planner.rules.offload import with_folder
from partool.planner.rules.pipeline import read_schedule
from partool.planner.rules.table import check
from partool.planner.rules.tensor_cuts import without_tensor
from partool.planner.rules.weights import check_teacher, check_weights
from partool.planner.teacher import resolve_teacher
from partool.spec._source import SpecPath
from partool.spec.data import DataSpec
from partool.spec.hardware import Devices
from partool.spec.launch import LaunchSpec
from partool.spec.model import ModelConfig, ModelSpec
from partool.spec.spec import Spec
from partool.spec.watched import Origins, independent, reading, watched
from partool.strategies.engines import ENGINES


@dataclass(frozen=True)
class Resolved:
    """A spec with its model, machines and data looked up and checked; ``problem`` is None if there are errors."""

    problem: Problem | None
    diagnostics: list[Diagnostic]
    data: DataSpec
    model_source: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    measured: Applied | None = None
    launch: LaunchSpec = field(default_factory=LaunchSpec)
    """Launch section with the site profile merged in, and absolute paths."""
    generation: Generation | None = None
    teacher: TeacherModel | None = None
    """The teacher of ``training.distill``, without its partition; None without one."""


def resolve(spec: Spec, base_dir: Path, budget: SearchBudget | None = None) -> Resolved:
    """Look up the model, machines and data of a spec, and check that they go together.

    ``budget`` counts the rows that searches price; None for a new counter.
    """
    launching = resolve_launch(spec.launch, base_dir)
    with reading() as reads:
        resolved = resolve_data(spec, launching.launch, base_dir)
        data, tokenizer_vocab, findings = resolved.data, resolved.vocab, reads.kept(resolved.findings)
    with reading() as reads:
        unsound = any(finding.severity == "error" for finding in findings)
        resolved_spec = spec.model_copy(update={"data": data})
        counted, more = (resolved_spec, []) if unsound else with_steps(resolved_spec)
        findings += reads.kept(more)
    written, spec = spec, counted
    with reading() as reads:
        model = resolve_model(spec.model, base_dir, tokenizer_vocab, sequence_length=spec.training.sequence_length)
        findings += reads.kept(model.diagnostics)
    precision = spec.training.precision
    with reading() as reads:
        hardware = resolve_hardware(spec.hardware, precision, spec.limits.max_devices)
        findings += reads.kept(hardware.diagnostics)
    if model.config is None or hardware.devices is None:
        return Resolved(None, findings, data)
    measured, more = _measured(spec, within_cores(launching.launch, spec.hardware, hardware.devices), base_dir)
    with reading() as reads:
        teacher, unsound_teacher = resolve_teacher(spec, base_dir)
        findings += reads.kept(unsound_teacher)
    problem, wrong = _problem(spec, base_dir, model, measured, budget or SearchBudget(), teacher)
    findings += [*more, *wrong, *check(problem, tokenizer_vocab), *launching.check(problem.devices)]
    findings += independent(check_weights, spec, launching.launch, problem.model, base_dir)
    findings += independent(check_teacher, spec, launching.launch, teacher)
    findings += independent(check_files, written, launching.launch, base_dir)
    tables = table_hashes(spec.kernels.tuned, base_dir)
    kernels = _measured_kernels(measured.devices, experts=model.config.moe is not None)
    inputs = _inputs(written, {**model.inputs, **measured.inputs, **kernels, **launching.site.inputs, **tables})
    usable = None if any(finding.severity == "error" for finding in findings) else problem
    generation = None if model.generation is None else Generation.model_validate(model.generation)
    return Resolved(usable, findings, data, model.source, inputs, measured, launching.launch, generation, teacher)


def _measured(spec: Spec, devices: Devices, base_dir: Path) -> tuple[Applied, list[Diagnostic]]:
    """Return the machines with the figures of a calibration, and findings about the calibration."""
    stack = ENGINES[spec.engine].code_base(spec.parallel.compile)
    with reading() as reads:
        measured = apply_profile(spec.hardware, devices, spec.training.precision, base_dir=base_dir, stack=stack)
        return measured, reads.kept(measured.findings)


def _problem(  # noqa: PLR0917 - one step of resolve
    spec: Spec,
    base_dir: Path,
    model: ResolvedModel,
    measured: Applied,
    budget: SearchBudget,
    teacher: TeacherModel | None,
) -> tuple[Problem, list[Diagnostic]]:
    """Return the planner's problem, in which the model replaces ``auto`` where it leaves no choice, and findings."""
    assert model.config is not None
    with reading() as reads:
        lists, unsound = read_schedule(spec, base_dir)
        findings = reads.kept(unsound)
    resolved_spec = with_folder(spec, base_dir)
    described = None if model.described is None else Description.model_validate(model.described)
    if described is not None:
        described = with_graph(resolved_spec, described, base_dir)
        resolved_spec = narrowed(resolved_spec, described)
        with reading() as reads:
            resolved_spec, left_out = without_tensor(resolved_spec, described)
            findings += reads.kept(left_out)
        findings += independent(unused_weights, spec, base_dir)
    resolved_spec = adversarial.whole_models(with_engine_defaults(resolved_spec))
    of_teacher = None if teacher is None else teacher.model
    resolved_spec = distill.settled(resolved_spec, model.config, of_teacher)
    config = watched(_adapted(model.config, spec, described), _origins_of_model(spec))
    devices = watched(measured.devices, _origins_of_devices())
    problem = Problem(resolved_spec, config, devices, measured, lists, described, of_teacher, budget=budget)
    return problem, findings


def _adapted(model: ModelConfig, spec: Spec, described: Description | None) -> ModelConfig:
    """Return the model with the matrices that the spec's adapter adds, to a model of other code as it is priced."""
    if spec.adapter is None:
        return model
    form = spec.adapter.form if described is None else priced_adapter(described.structure, spec.adapter, model)
    return model.model_copy(update={"adapter": form})


_BY_PRECISION = (
    "peak_flops", "achievable_flops", "sustained_share", "product_element_s", "wide_flops", "attention_flops",
    "attention_by_length", "measured_rows",
)  # fmt: skip
"""Fields of the machines that depend on the precision of training."""
_BY_CORES = ("threads_per_rank", "achievable_flops", "memory_bytes_per_s")
"""Fields of the machines that depend on the cores that the launch section gives the ranks."""


def _origins_of_devices() -> Origins:
    """Return the paths of the spec that decide each field of the machines."""
    origins: dict[str, tuple[SpecPath, ...]] = {}
    for name in Devices.model_fields:
        of_precision = (("training", "precision"),) if name in _BY_PRECISION else ()
        of_cores = (("launch",),) if name in _BY_CORES else ()
        origins[name] = (("hardware",), ("limits", "max_devices"), *of_precision, *of_cores)
    return origins


def _origins_of_model(spec: Spec) -> Origins:
    """Return the paths of the spec that decide each field of the resolved model.

    A field that the spec gives is decided by itself alone, each other field by all fields of the section that are about
    the model's form.
    """
    given = spec.model.model_fields_set
    of_form = tuple(("model", name) for name in ModelSpec.model_fields if name not in ("weights", "frozen"))
    origins: dict[str, tuple[SpecPath, ...]] = dict.fromkeys(ModelConfig.model_fields, of_form)
    origins |= {name: (("model", name),) for name in given & origins.keys()}
    origins["adapter"] = (("adapter",),)
    origins["multi_token"] = (("model", "multi_token"),)
    return origins | ({} if "vocab" in given else {"vocab": (*of_form, ("data",))})


def _measured_kernels(devices: Devices, *, experts: bool) -> dict[str, str]:
    """Return the hashes of the tables of measured kernels and collectives, where they price these devices."""
    families = set(FAMILIES if devices.measured_as else ())
    if experts and devices.backend != "cpu":
        families.add("experts")  # devices without curves have those of another device
    if measured_device(devices.accelerator, devices.measured_as) and not devices.slice:
        families.add("collectives")  # cards in PCIe slots share those of two servers
    return {f"catalog/silicon/{family}": family_hash(family) for family in sorted(families)}


def spec_hash(spec: Spec) -> str:
    """Return the hash of all that a user wrote in a spec."""
    return hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _inputs(spec: Spec, model_inputs: dict[str, str]) -> dict[str, str]:
    inputs = {"spec": spec_hash(spec), "catalog/accelerators": table_hash("accelerators")}
    machines = {f"catalog/{name}": table_hash(name) for name in ("hosts", "fabrics", "network_env")}
    return {**inputs, **machines, **model_inputs}
