"""Models for the measurements of tensor parallelism, and the tolerances of their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _tensor_job import Found

SIZES: dict[str, dict[str, Any]] = {
    "wide": {"layers": 4, "hidden": 512, "ffn_hidden": 1376, "heads": 8, "kv_heads": 4, "vocab": 8192},
    "narrow": {"layers": 8, "hidden": 128, "ffn_hidden": 344, "heads": 4, "kv_heads": 2, "vocab": 1024},
}
SHAPES = {"wide": (2, 256), "narrow": (1, 128)}
"""Sequences and tokens of a micro-batch."""
TINY = {"layers": 2, "hidden": 24, "ffn_hidden": 36, "heads": 6, "kv_heads": 2, "head_dim": 4, "vocab": 258}
TOLERANCE = 1e-9
"""Largest relative difference of a loss in float64 from the first case's, after a few steps."""
FLOAT_TOLERANCE = 1e-4
"""Largest such difference in float32."""


def spec(
    model: Mapping[str, Any], shape: tuple[int, int], precision: str, *, accelerator: str = "cpu", ranks: int = 1
) -> dict[str, Any]:
    """Return a spec of tensor ranks whose steps are one micro-batch."""
    return {
        "name": "bench",
        "model": dict(model),
        "hardware": {"accelerator": accelerator, "per_node": ranks},
        "data": {"source": "python-stdlib", "validation": 0.0},
        "training": {
            "sequence_length": shape[1],
            "global_batch": shape[0],
            "steps": 100,
            "precision": precision,
            "validation": {"every": 0},
        },
        "optimizer": {"lr": 1e-3, "schedule": {"kind": "constant", "warmup_steps": 0}},
        "parallel": {
            "tensor": {"degree": ranks, "shape": [ranks, 1], "sequence_norms": False, "overlap": "none", "chunks": 1},
            "data": {"zero": 0},
            "micro_batch": shape[0],
            "recompute": "none",
            "compile": "none",
        },
    }


def apart(found: Sequence[Found], limit: float) -> float:
    """Return the difference of losses from the first case's; exits if it is too large, or if nothing is learnt."""
    first = found[0].losses
    most = max(abs(a - b) / abs(b) for each in found for a, b in zip(each.losses, first, strict=True))
    if not most <= limit or first[0] == first[-1]:
        losses = [(each.case.title, each.case.engine, each.losses) for each in found]
        raise SystemExit(f"losses differ by {most:.1e}, nothing is timed: {losses}")
    return most
