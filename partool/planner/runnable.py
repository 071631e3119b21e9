"""Whether the runtime can run a layout, or any layout, of a problem."""

from __future__ import annotations

from partool.layout.capabilities import GATHERS, Needs, aspects, gaps, runs
from partool.plan.types import Layout
from partool.planner.problem import Problem
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig


def needs(problem: Problem, layout: Layout) -> Needs:
    """Return what a layout of a problem asks of the runtime."""
    precision = problem.spec.training.precision
    frozen, hf = bool(problem.spec.model.frozen), problem.described is not None
    return needs_of(layout, problem.model, problem.devices, precision, frozen=frozen, hf=hf)


def needs_of(
    layout: Layout, model: ModelConfig, devices: Devices, precision: str, *, frozen: bool, hf: bool = False
) -> Needs:
    """Return what a layout asks of the runtime; ``hf``: transformers builds the model."""
    mesh = layout.mesh
    return Needs(
        model=model,
        frozen=frozen,
        backend=devices.backend,
        nodes=devices.nodes,
        zero=layout.zero,
        replicas=mesh.dp_replicate,
        tensor=mesh.tp,
        tensor_inner=layout.tensor_inner,
        sequence_norms=layout.sequence_norms,
        tensor_overlap=layout.tensor_overlap,
        stages=mesh.pp,
        schedule=layout.schedule,
        sequence=mesh.cp,
        sequence_method=layout.sequence_method,
        expert=layout.expert,
        offload_optimizer=layout.offload_optimizer,
        offload_parameters=layout.offload_parameters,
        offload_activations=layout.offload_activations,
        accumulation=layout.accumulation,
        recompute=frozenset(layout.recompute),
        compile=layout.compile,
        precision=precision,
        architecture=devices.architecture,
        hf=hf,
        gathers=_gathers(layout),
        mlp_tile=layout.mlp_tile_tokens,
        loss_tile=layout.loss_tile_tokens,
    )


def _gathers(layout: Layout) -> frozenset[str]:
    asked = (layout.gather != "coalesced", layout.prefetch != 1, layout.persistent_elements > 0, bool(layout.leaves))
    return frozenset(name for name, applies in zip(GATHERS, asked, strict=True) if applies)


def runnable(problem: Problem, layout: Layout) -> bool:
    """Return True if the runtime can run a layout."""
    return not gaps(needs(problem, layout))


def plain_needs(problem: Problem) -> Needs:
    """Return what every layout of a problem asks of the runtime, whatever is left open."""
    return Needs(
        model=problem.model,
        frozen=bool(problem.spec.model.frozen),
        backend=problem.devices.backend,
        nodes=problem.devices.nodes,
        zero=0,
        replicas=1,
        tensor=1,
        tensor_inner=1,
        sequence_norms=False,
        tensor_overlap="none",
        stages=1,
        schedule="1f1b",
        sequence=1,
        expert=1,
        offload_optimizer="none",
        offload_parameters="none",
        offload_activations="none",
        accumulation=1,
        recompute=frozenset({"none"}),
        compile=problem.compile,
        precision=problem.spec.training.precision,
        architecture=problem.devices.architecture,
        hf=problem.described is not None,
    )


def nothing_runs(problem: Problem) -> bool:
    """Return True if no layout of a problem can be run, for its model or its machines."""
    return any(not runs(aspect) for aspect in aspects(plain_needs(problem)))
