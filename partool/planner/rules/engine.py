"""What plans for another training system always have, and findings about settings that the system lacks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from partool.cost.case import EXCHANGES, RECOMPUTE, SCHEDULES, SEQUENCE_METHODS, Layouts
from partool.diagnostics.record import Diagnostic
from partool.planner.forms.runnable import of_columns
from partool.planner.problem import Problem
from partool.planner.rules.jobs import setting_at, with_setting
from partool.spec.spec import Spec
from partool.spec.training import KernelsSpec
from partool.strategies.engines import ENGINES
from partool.strategies.jobs import JOBS

_PATHS = {
    "zero": "data.zero", "recompute": "recompute", "schedule": "pipeline.schedule", "sequence": "sequence.method",
    "hybrid": "data.shard", "tensor": "tensor", "norms": "tensor.sequence_norms", "expert": "expert",
    "parts": "expert_tensor", "node-first": "expert_exchange",
    "padded": "expert_exchange", "tiles": "tiles", "offload": "offload",
    "sequential": "data.gather", "other": "data.prefetch", "persistent": "data.persistent", "leaves": "data.leaves",
}  # fmt: skip
"""First word of an aspect of layouts → field of ``parallel`` that asks for it."""


def with_engine_defaults(spec: Spec) -> Spec:
    """Return the spec with the values that every plan for its engine and job has, where the spec leaves them ``auto``.

    partool's own kernels are of its runtime only.
    """
    parallel, engine = spec.parallel, ENGINES[spec.engine]
    for path, value in (*JOBS[spec.job].settled.items(), *engine.settled.items(), *engine.preferred.items()):
        if setting_at(parallel, path) == "auto":
            parallel = with_setting(parallel, path, value)
    if parallel is spec.parallel:
        return spec
    plain = engine.stack is not None and spec.kernels == KernelsSpec()
    kernels = spec.kernels.model_copy(update={"mode": "torch"}) if plain else spec.kernels
    return spec.model_copy(update={"parallel": parallel, "kernels": kernels})


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings if a plan for another engine is for CPUs, or asks for what the engine lacks."""
    engine, asked = problem.engine, problem.spec.parallel
    if engine.stack is not None and problem.devices.backend == "cpu":
        message = f"the constants of {engine.title} are of accelerators, and these devices are CPUs"
        yield Diagnostic("PT827", message, path=("engine",), help="name an accelerator, or write engine: partool")
    for field, value in engine.settled.items():
        if (given := setting_at(asked, field)) != value:
            path = ["parallel", *field.split(".")]
            message = f"{field}: {given} is not for {engine.title}, whose plans have {value}"
            yield Diagnostic("PT828", message, path=tuple(path), help=f"drop it, or use {value}, or engine: partool")
    if engine.stack is not None and problem.spec.kernels.mode != "torch":
        message = f"partool's kernels are no part of {engine.title}"
        yield Diagnostic("PT828", message, path=("kernels",), help="drop the section, or use mode: torch")
    for aspect in dict.fromkeys(_asked(problem)):
        if aspect in engine.lacks:
            path = ["parallel", *_PATHS[aspect.split()[0]].split(".")]
            help = f"--set {'.'.join(path)}=auto, or partool plan --improve, which opens the whole layout"
            yield Diagnostic("PT828", f"{engine.title} has no {aspect}", path=tuple(path), help=help)
    zero = asked.data.zero
    if asked.offload.optimizer in ("cpu", "nvme") and zero != "auto" and zero < engine.offloads_from:
        message = f"{engine.title} offloads the optimizer from zero: {engine.offloads_from} on, and zero is {zero}"
        yield Diagnostic("PT828", message, path=("parallel", "data", "zero"), help="use a higher stage")


def _asked(problem: Problem) -> Iterator[str]:
    """Yield the aspects of layouts that the spec asks for."""
    asked = problem.spec.parallel
    aspects = [aspect for aspect, applies in of_columns(_row(problem)) if applies]
    if asked.data.zero == "auto":  # the row has some stage
        aspects = [aspect for aspect in aspects if not aspect.startswith("zero")]
    yield from aspects
    if isinstance(asked.recompute, list):
        yield from (f"recompute {policy}" for policy in sorted(set(asked.recompute)))
    others = (
        (asked.data.gather == "sequential", "sequential gathers"),
        (asked.data.prefetch not in ("auto", 1), "other prefetch"),
        (asked.data.persistent not in ("auto", 0), "persistent parameters"),
        (asked.data.leaves not in ("auto", []), "leaves"),
        (asked.offload.optimizer == "nvme", "offload to disks"),
        (asked.offload.parameters == "nvme", "offload of parameters to disks"),
    )
    yield from (aspect for applies, aspect in others if applies)


def _row(problem: Problem) -> Layouts:
    """Return a row with the values that the spec sets; the other columns say nothing that any engine lacks."""
    asked, degrees = problem.spec.parallel, problem.pinned_degrees
    offload = asked.offload
    moved = offload.optimizer in ("cpu", "nvme") or offload.parameters in ("cpu", "nvme")
    replicas = 1
    if isinstance(asked.data.shard, int) and len(degrees) == 3:
        ranks = reduce(int.__mul__, degrees.values(), 1)
        replicas = max(1, problem.world_size // (ranks * asked.data.shard))
    pinned: dict[str, Any] = {
        "pp": degrees.get("pipeline.stages", 1), "cp": degrees.get("sequence.degree", 1),
        "tp": degrees.get("tensor", 1), "ep": asked.expert, "etp": asked.expert_tensor, "zero": asked.data.zero,
        "expert_exchange": _index(EXCHANGES, asked.expert_exchange), "replicas": replicas,
        "recompute": _index(RECOMPUTE, asked.recompute),
        "schedule": _index(SCHEDULES, asked.pipeline.schedule if problem.lists is None else "file"),
        "sequence_method": _index(SEQUENCE_METHODS, asked.sequence.method),
        "gpu_fraction": 0.0 if moved else 1.0, "offload_parameters": int(offload.parameters in ("cpu", "nvme")),
        "offload_activations": int(offload.activations == "cpu"),
        "tensor_inner": asked.tensor.shape[1] if isinstance(asked.tensor.shape, list) else 1,
        "sequence_norms": int(asked.tensor.sequence_norms is True),
    }  # fmt: skip
    if asked.pipeline.schedule == "auto":
        pinned["schedule"] = SCHEDULES.index("1f1b")
    return Layouts(**{name: value for name, value in pinned.items() if value not in ("auto", None)})


def _index(names: tuple[str, ...], value: Any) -> int | None:
    return names.index(value) if isinstance(value, str) and value in names else None
