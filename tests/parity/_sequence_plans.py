"""Plans whose ranks share sequences, built by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _tensor_plans import EVEN, LATENT, tensor_plan

from partool.plan.layout import Mesh
from partool.plan.types import Plan

STEPS = 3
LENGTH = 17
"""Tokens of a sequence: no number of ranks divides it."""
MODELS: dict[str, dict[str, Any]] = {
    "five": {},
    "learned": {
        "tied_embeddings": True, "position": "learned", "max_position": LENGTH, "out_bias": True, "norm": "layernorm",
    },
    "grouped": {"heads": 6, "kv_heads": 2, "head_dim": 4, "qk_norm": True, "qkv_bias": True},
    "one head of keys": {"heads": 7, "kv_heads": 1, "head_dim": 4},
    "windows": {"window": 6, "layer_types": ("sliding", "full", "sliding", "sliding"), "heads": 6, "kv_heads": 3},
    "three": {"heads": 3, "kv_heads": 3, "head_dim": 4},
    "even": EVEN,
    "latent": LATENT,
    "latent-lite": LATENT | {"mla": LATENT["mla"].model_copy(update={"q_rank": None, "v_head_dim": 8})},
}  # fmt: skip
"""Five, seven and three heads for two to four ranks; a window as long as one share and a bit."""


def sequence_plan(
    text: Path,
    mesh: Mesh,
    method: str = "ulysses",
    *,
    model: str = "five",
    data: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **fields: Any,
) -> Plan:
    """Return a plan of four layers, with 12 sequences of 17 tokens a step; ``fields`` are those of ``tensor_plan``.

    ``order``, ``inner``, ``teams`` and ``inside`` are fields of the layout whose names begin with ``sequence_``.
    """
    own = {f"sequence_{name}": fields.pop(name) for name in ("order", "inner", "teams", "inside") if name in fields}
    plan = tensor_plan(
        text,
        mesh,
        model=MODELS[model],
        training={"sequence_length": LENGTH},
        settings={"steps": STEPS, "checkpoint": {"every": STEPS}} | (settings or {}),
        sequence_method=method,
        **own,
        **fields,
    )
    return plan.model_copy(update={"data": plan.data.model_copy(update=data or {})})


def write_short_documents(folder: Path) -> None:
    """Write documents most of which are shorter than a sequence: of what is padded, the last ranks have the most."""
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number} short ones "[: 3 + number])
