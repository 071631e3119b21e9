"""Convert a layout to a spec's section ``parallel`` that allows no other layout ("use this layout")."""

from __future__ import annotations

from typing import Any

import yaml

from partool.plan.layout import Layout
from partool.plan.types import Plan
from partool.spec.offload_checks import OF_THE_OPTIMIZER
from partool.spec.parallel import Offload, ParallelSpec, ScheduleFile
from partool.spec.runs import in_runs
from partool.strategies.sequence import METHODS

_WIDTH = 78
"""Most columns of a line, so that a line fits a terminal of 80 columns."""


def as_yaml(layout: Layout, asked: ParallelSpec) -> str:
    """Return the section of :func:`as_spec` as YAML that ends in a newline."""
    return _yaml(as_spec(layout, asked))


def own_yaml(plan: Plan) -> str:
    """Return as YAML the section ``parallel`` that allows only the plan's layout, with lists in runs, for people."""
    section = as_spec(plan.layout, plan.asked)
    if isinstance(policies := section["recompute"], list):
        section["recompute"] = in_runs(policies)
    pipeline = _pipeline(plan.layout, plan.asked)
    if "layers" in pipeline:
        section["pipeline"] = pipeline | {"layers": in_runs(pipeline["layers"])}
    return _yaml(section)


def _yaml(section: dict[str, object]) -> str:
    return yaml.safe_dump(
        {"parallel": section}, default_flow_style=None, sort_keys=False, width=_WIDTH, allow_unicode=True
    )


def as_spec(layout: Layout, asked: ParallelSpec) -> dict[str, object]:
    """Return the section ``parallel`` that allows only this layout if batch and ``kernels`` of the spec stay unchanged.

    ``asked`` is the section that the layout was planned from; patterns, schedule file and settings of the
    host's work are taken from ``asked``. The section does not state the accumulation, which follows from the batch, or
    the fused parts of the model, which follow from ``kernels``.
    """
    return {
        "data": _data(layout),
        "tensor": _tensor(layout),
        "pipeline": _pipeline(layout, asked),
        "sequence": _sequence(layout),
        "tiles": {"mlp": layout.tiles.mlp, "loss": layout.tiles.loss},
        "expert": layout.expert,
        **(_expert(layout) if layout.expert > 1 else {}),
        "offload": _offload(layout, asked.offload),
        "recompute": layout.recompute[0] if len(set(layout.recompute)) == 1 else list(layout.recompute),
        "compile": layout.compile,
        "micro_batch": layout.micro_batch,
    }


def _expert(layout: Layout) -> dict[str, object]:
    section: dict[str, object] = {"expert_tensor": layout.expert_tensor, "expert_exchange": layout.expert_exchange}
    if layout.expert_rank_capacity is not None:
        section["expert_rank_capacity"] = layout.expert_rank_capacity
    return section


def _data(layout: Layout) -> dict[str, Any]:
    data = layout.data
    section: dict[str, Any] = {"zero": data.zero}
    if data.zero and layout.mesh.dp > 1:
        section["shard"] = data.shard
    several = data.shard * layout.sequence.degree > 1
    if data.zero and several:
        section["gather"] = data.gather
    if data.zero == 3 and several:
        section |= {"prefetch": data.prefetch, "persistent": data.persistent}
    return section | ({"leaves": list(data.leaves)} if data.leaves else {})


def _tensor(layout: Layout) -> dict[str, Any]:
    tensor = layout.tensor
    if tensor.degree == 1:
        return {"degree": 1}
    fields = tensor.model_dump(mode="json", exclude_defaults=True, include={"patterns"})
    return {
        "degree": tensor.degree,
        "shape": list(tensor.shape),
        "sequence_norms": tensor.sequence_norms,
        "overlap": tensor.overlap,
        "chunks": tensor.chunks,
        **fields,
    }


def _pipeline(layout: Layout, asked: ParallelSpec) -> dict[str, Any]:
    pipeline = layout.pipeline
    if pipeline.stages == 1:
        return {"stages": 1}
    section: dict[str, Any] = {"stages": pipeline.stages, "schedule": pipeline.schedule}
    if isinstance(asked.pipeline.schedule, ScheduleFile) and pipeline.schedule == "file":
        section["schedule"] = {"file": asked.pipeline.schedule.file}
    elif pipeline.waves:
        section["waves"] = pipeline.waves
    elif pipeline.chunks > 1:
        section["chunks"] = pipeline.chunks
    if pipeline.in_flight:
        section["in_flight"] = pipeline.in_flight
    return section | {"layers": list(pipeline.layers)}


def _sequence(layout: Layout) -> dict[str, Any]:
    sequence = layout.sequence
    if sequence.degree == 1:
        return {"degree": 1}
    section: dict[str, Any] = {"method": sequence.method, "degree": sequence.degree}
    section |= {field: getattr(sequence, field) for field in METHODS[sequence.method].fields}
    return section | ({} if sequence.order == "grid" else {"order": sequence.order})


def _offload(layout: Layout, asked: Offload) -> dict[str, Any]:
    offload = layout.offload
    section: dict[str, Any] = {"optimizer": offload.optimizer}
    if offload.optimizer != "none":
        section["gpu_fraction"] = offload.gpu_fraction
    section |= {"parameters": offload.parameters, "activations": offload.activations}
    # These settings say how to offload; where the spec leaves them open, they follow from what is offloaded.
    names: tuple[str, ...] = OF_THE_OPTIMIZER if offload.optimizer != "none" else ()
    names += ("dir", "buffers") if "nvme" in (offload.optimizer, offload.parameters) else ()
    names += ("pinned_gib",) if offload.active else ()
    said = {name: getattr(asked, name) for name in names}
    return section | {name: value for name, value in said.items() if value not in ("auto", None)}
