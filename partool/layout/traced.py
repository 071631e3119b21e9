"""What the runtime's trace of saved tensors and the planner agree on: names of widths and of kinds of models."""

from __future__ import annotations

from collections.abc import Collection

from partool.spec.model import ModelConfig
from partool.spec.parallel import Compile, Recompute
from partool.spec.training import Fused, Precision
from partool.strategies.kernel_parts import IN_BLOCKS, PARTS

WIDTHS = ("hidden", "query", "key", "inner", "heads", "kv_heads", "scores", "vocab", "one")
"""Widths per token that a saved tensor may have: the residual stream, all heads' queries, all heads' keys, the inner
width of the feed-forward network, heads, heads of keys, heads times sequence, vocabulary, and one number."""
COEFFICIENTS = (*WIDTHS, "layer")
"""Coefficients of a family in the order of the data: bytes per token and width, and per layer and micro-batch."""


def applicable(model: ModelConfig) -> tuple[Fused, ...]:
    """Return the parts of a block that a model has, of those that can be fused."""
    has = {"nothing": True, "gate": model.gated, "rotation": model.position == "rope" and model.mla is None}
    return tuple(part for part in IN_BLOCKS if has[PARTS[part].needs])


def family(
    model: ModelConfig, precision: Precision, compile: Compile, policy: Recompute, fused: Collection[Fused] = ()
) -> str:
    """Return the kind of a model whose blocks keep the same tensors, whatever their sizes and what tokens see."""
    inside = tuple(part for part in IN_BLOCKS if part in fused)
    parts = (
        model.norm,
        model.activation,
        "rope" if model.position == "rope" else "plain",
        "qk-norm" if model.qk_norm else "raw",
        compile,
        policy,
        numbers(precision),
        *(["fused" if inside == applicable(model) else "-".join(("fused", *inside))] if inside else []),
    )
    return "/".join(parts)


def head_family(model: ModelConfig, precision: Precision) -> str:
    """Return the kind of a model's final norm, head and loss."""
    return f"head/{model.norm}/{numbers(precision)}"


def numbers(precision: Precision) -> str:
    """Return the class of a precision: fp32 and fp64 keep no copies in a wider type; fp64's are twice fp32's."""
    return "wide" if precision in ("fp32", "fp64") else "narrow"
