"""Names of widths and of families of models, shared by the planner and the runtime's trace of saved tensors."""

from __future__ import annotations

from collections.abc import Collection

from partool.spec.model import ModelConfig
from partool.spec.parallel import Compile, Recompute
from partool.spec.training import Fused, Precision
from partool.strategies.kernel_parts import FUSED_GATES, IN_BLOCKS, PARTS

LATENT_WIDTHS = ("value", "expanded", "q_rank", "kv_rank", "latent", "rotary")
"""Widths that only latent attention has: values of all heads, product of a latent that holds all heads' values and
parts of keys, latent of queries, latent of keys and values, this latent with the rotary part of keys, and that part."""
WIDTHS = ("hidden", "query", "key", "inner", "heads", "kv_heads", "scores", "vocab", "one", *LATENT_WIDTHS)
"""Widths per token of saved tensors: residual stream, queries of all heads, keys of all heads, inner width of the
feed-forward network, query heads, key heads, query heads times sequence length, vocabulary, 1, and
:data:`LATENT_WIDTHS`."""
COEFFICIENTS = (*WIDTHS, "layer")
"""Names of the coefficients of a family of models, in the order of the stored data. The
coefficient of a width is in bytes per token and unit of the width; ``layer`` is in bytes per layer and micro-batch."""


def applicable(model: ModelConfig) -> tuple[Fused, ...]:
    """Return the parts of a block that can be fused and that the model has."""
    has = {
        "nothing": True,
        "gate": model.activation in FUSED_GATES,
        "rotation": model.position == "rope" and model.mla is None,
    }
    return tuple(part for part in IN_BLOCKS if has[PARTS[part].needs])


def family(
    model: ModelConfig, precision: Precision, compile: Compile, policy: Recompute, fused: Collection[Fused] = ()
) -> str:
    """Return the name of a model's family; blocks of a family save the same tensors, for all sizes and masks."""
    inside = tuple(part for part in IN_BLOCKS if part in fused)
    parts = (
        model.norm,
        model.activation,
        "rope" if model.position == "rope" else "plain",
        _heads(model),
        compile,
        policy,
        numbers(precision),
        *(["fused" if inside == applicable(model) else "-".join(("fused", *inside))] if inside else []),
    )
    return "/".join(parts)


def _heads(model: ModelConfig) -> str:
    if model.mla is not None:
        return "latent" if model.mla.q_rank is None else "latents"
    return "qk-norm" if model.qk_norm else "raw"


def head_family(model: ModelConfig, precision: Precision) -> str:
    """Return the name of the family that describes a model's final norm, head and loss."""
    return f"head/{model.norm}/{numbers(precision)}"


def numbers(precision: Precision) -> str:
    """Return ``wide`` for fp32 and fp64, which need no copies in a larger type, and ``narrow`` for other precisions."""
    return "wide" if precision in ("fp32", "fp64") else "narrow"
