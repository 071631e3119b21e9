"""Plans with tensor parallelism, built by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _plans import small_plan
from layouts import laid

from partool.layout.tensor import own_partition
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.model import Mla, RopeScaling

LAYERS = 4
STEPS = 3
LENGTH = 15
HALVES = ((0, 1), (1, 4))
QUARTERS = ((0, 1), (1, 2), (2, 3), (3, 4))
ONE = Mesh()
FIVE: dict[str, Any] = {}
"""Five heads of 6, a feed-forward width of 37 and 257 tokens: nothing divides."""
TIED = {"tied_embeddings": True, "position": "learned", "max_position": LENGTH, "ffn_bias": True, "out_bias": True}
SHARED = {"heads": 6, "kv_heads": 1, "head_dim": 4, "qk_norm": True, "qkv_bias": True, "norm": "layernorm"}
"""One head of keys for all ranks."""
EVEN = {"hidden": 24, "heads": 4, "kv_heads": 4, "head_dim": 6, "ffn_hidden": 20, "vocab": 258}
"""For two-dimensional cuts."""
LATENT: dict[str, Any] = {
    "heads": 5, "kv_heads": 5, "head_dim": 7, "qkv_bias": True,
    "mla": Mla(q_rank=9, kv_rank=8, nope_head_dim=3, rope_head_dim=4, v_head_dim=5),
    "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_position=4, mscale=0.5, mscale_all_dim=0.8),
}  # fmt: skip
"""Latent attention with YaRN, whose values are narrower than its keys."""


def tensor_plan(
    text: Path,
    mesh: Mesh,
    *,
    model: dict[str, Any] | None = None,
    stages: tuple[tuple[int, int], ...] | None = None,
    micro_batches: int = 2,
    recompute: str = "none",
    frozen: tuple[str, ...] = (),
    training: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **layout: Any,
) -> Plan:
    """Return a plan of four layers, with 12 sequences of 15 tokens a step; ``layout`` are fields of its layout."""
    fields: dict[str, Any] = {"layers": LAYERS} | (model or {})
    layers = fields["layers"]
    stages = stages or ((0, layers),)
    settings = {"zero": 1, "precision": "fp64", "steps": STEPS} | (settings or {})
    training = {"sequence_length": LENGTH} | (training or {})
    plain = small_plan(text, ranks=mesh.dp, accumulation=micro_batches, model=fields, training=training, **settings)
    update = {"mesh": mesh, "stages": stages, "chunks": len(stages) // mesh.pp, "recompute": (recompute,) * layers}
    cut = laid(plain.layout, **(update | layout))
    return plain.model_copy(
        update={
            "layout": cut,
            "devices": plain.devices.model_copy(update={"per_node": mesh.world_size}),
            "frozen": frozen,
            "partition": own_partition(plain.model, mesh.tp, cut.tensor.inner, cut.tensor.sequence_norms, cut.expert),
        }
    )
