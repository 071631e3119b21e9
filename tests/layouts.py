"""Layouts for tests, with the columns' short names (:class:`partool.cost.case.Layouts`) and a whole mesh.

``laid(layout, mesh=Mesh(tp=4), tensor_inner=2)`` is a layout with other values; ``new_layout(...)`` a new one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from partool.plan.layout import DataLayout, Derived, Layout, Mesh, PipelineLayout

_PLACES = {
    "zero": "data.zero", "gather": "data.gather", "prefetch": "data.prefetch", "leaves": "data.leaves",
    "persistent": "data.persistent", "schedule_text": "derived.schedule_text",
    "accumulation": "derived.accumulation", "schedule_hash": "derived.schedule_hash", "fused": "derived.fused",
    "schedule": "pipeline.schedule", "in_flight": "pipeline.in_flight",
    "sequence_norms": "tensor.sequence_norms", "tensor_overlap": "tensor.overlap", "tensor_chunks": "tensor.chunks",
    "sequence_method": "sequence.method", "sequence_order": "sequence.order", "sequence_inner": "sequence.ulysses",
    "sequence_teams": "sequence.teams", "sequence_inside": "sequence.inside",
    "mlp_tile_tokens": "tiles.mlp", "loss_tile_tokens": "tiles.loss",
    "offload_optimizer": "offload.optimizer", "offload_parameters": "offload.parameters",
    "offload_activations": "offload.activations", "gpu_fraction": "offload.gpu_fraction",
    "speculate": "offload.speculate", "gradients": "offload.gradients", "moments": "offload.moments",
    "bucket_mib": "offload.bucket_mib", "undo_gib": "offload.undo_gib", "threads": "offload.threads",
    "dir": "offload.dir", "buffers": "offload.buffers", "pinned_gib": "offload.pinned_gib",
    "expert": "expert", "expert_tensor": "expert_tensor", "expert_exchange": "expert_exchange",
    "expert_rank_capacity": "expert_rank_capacity",
    "recompute": "recompute", "compile": "compile", "micro_batch": "micro_batch",
}  # fmt: skip


def laid(layout: Layout, **fields: Any) -> Layout:
    """Return a layout with other values. ``stages`` are first and one-past-last layers."""
    changes: dict[str, Any] = {}
    mesh: Mesh = fields.pop("mesh", layout.mesh)
    changes |= {
        "pipeline.stages": mesh.pp, "derived.replicas": mesh.dp_replicate, "data.shard": mesh.dp_shard,
        "sequence.degree": mesh.cp, "tensor.degree": mesh.tp,
    }  # fmt: skip
    inner = fields.pop("tensor_inner", layout.tensor.inner)
    changes["tensor.shape"] = (mesh.tp // inner, inner)
    if "stages" in fields:
        bounds = fields.pop("stages")
        assert all(first[1] == then[0] for first, then in pairwise(bounds))
        changes["pipeline.layers"] = tuple(stop - start for start, stop in bounds)
    schedule, chunks = fields.get("schedule", layout.pipeline.schedule), fields.pop("chunks", layout.pipeline.chunks)
    changes |= {"pipeline.chunks": chunks, "pipeline.waves": chunks // 2 if schedule == "hanayo" else 0}
    if fields.get("offload_optimizer", "none") != "none" and layout.offload.optimizer == "none":
        fields.setdefault("gpu_fraction", 0.0)
    changes |= {_PLACES[name]: value for name, value in fields.items()}
    changed = layout.changed(changes)
    return Layout.model_validate(changed.model_dump())


def new_layout(
    *, zero: Any, micro_batch: int, accumulation: int, recompute: Any, compile: Any, stages: Any, **more: Any
) -> Layout:
    """Return a layout with these values, on one device unless ``mesh`` says otherwise."""
    plain = Layout(
        data=DataLayout(zero=zero),
        pipeline=PipelineLayout(layers=tuple(stop - start for start, stop in stages)),
        recompute=recompute,
        compile=compile,
        micro_batch=micro_batch,
        derived=Derived(accumulation=accumulation),
    )
    return laid(plain, **more)
