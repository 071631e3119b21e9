"""What Hugging Face model types require of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from partool.spec.experts import GroupScore
from partool.spec.model import ModelConfig


class Condition(NamedTuple):
    """A requirement that a family places on a configuration."""

    holds: Callable[[ModelConfig], bool]
    text: str


ROPE_RMSNORM_GATED = (
    Condition(lambda c: c.norm == "rmsnorm", "norm is rmsnorm"),
    Condition(lambda c: c.position == "rope", "position is rope"),
    Condition(lambda c: c.activation in ("swiglu", "geglu"), "activation is swiglu or geglu"),
    Condition(lambda c: not c.sinks, "attention.sinks is false"),
)
NOT_LATENT = Condition(lambda c: c.mla is None, "there is no latent attention")


def _grouped_by(score: GroupScore) -> Condition:
    return Condition(
        lambda c: c.moe is None or c.moe.groups == 1 or c.moe.group_score == score, f"moe.group_score is {score}"
    )


DENSE = Condition(lambda c: c.moe is None, "there are no experts")
EXPERTS = (
    Condition(lambda c: c.moe is not None, "there are experts"),
    Condition(lambda c: c.moe is None or c.moe.routing == "learned", "moe.routing is learned"),
    Condition(lambda c: c.moe is None or c.moe.layers is None, "moe.layers is not given: all experts are alike"),
)
NO_SHARED = Condition(lambda c: c.moe is None or not c.moe.shared_experts, "moe.shared_experts is 0")
SHARED = Condition(
    lambda c: c.moe is None or (c.moe.shared_experts > 0 and not c.moe.residual),
    "moe.shared_experts is at least 1, and moe.residual false",
)
FIRST_DENSE = Condition(lambda c: c.moe is None or c.moe.every == 1, "moe.every is 1")
SOFTMAX = (
    Condition(lambda c: c.moe is None or c.moe.scores == "softmax", "moe.scores is softmax"),
    Condition(lambda c: c.moe is None or c.moe.bias_rate is None, "moe.bias_rate is null"),
)
NO_EXPERT_BIAS = Condition(lambda c: c.moe is None or not c.moe.bias, "moe.bias is false")
PLAIN_CHOICE = (
    *SOFTMAX,
    Condition(lambda c: c.moe is None or c.moe.groups == 1, "moe.groups is 1"),
    Condition(lambda c: c.moe is None or c.moe.scaling_factor == 1.0, "moe.scaling_factor is 1"),
    NO_SHARED,
)
NORMALISED_EVERYWHERE = (
    Condition(lambda c: c.moe is None or c.moe.normalise, "moe.normalise is true"),
    Condition(lambda c: all(map(c.is_moe_layer, range(c.layers))), "all layers have experts"),
)
LATENT = (
    Condition(lambda c: c.mla is not None, "attention is latent (mla)"),
    *ROPE_RMSNORM_GATED[:2],
    Condition(lambda c: c.activation == "swiglu", "activation is swiglu"),
    Condition(
        lambda c: not (c.qkv_bias and c.mla is not None and c.mla.q_rank is None), "qkv_bias is false without q_rank"
    ),
)
QK_NORM = Condition(lambda c: c.qk_norm, "qk_norm is true")
NO_QK_NORM = Condition(lambda c: not c.qk_norm, "qk_norm is false")
NO_WINDOW = Condition(lambda c: not _windowed(c), "no layer has a sliding window")
NO_AXES = Condition(lambda c: not {"row", "column"} & set(c.layer_types), "no layer attends along rows or columns")
NO_FFN_BIAS = Condition(lambda c: not c.ffn_bias, "ffn_bias is false")
NO_ATTENTION_BIAS = Condition(lambda c: not c.qkv_bias and not c.out_bias, "qkv_bias and out_bias are false")
SAME_BIAS = Condition(lambda c: c.qkv_bias == c.out_bias, "qkv_bias equals out_bias")
DEEPSEEK = (
    *LATENT,
    NO_QK_NORM,
    NO_WINDOW,
    NO_AXES,
    NO_FFN_BIAS,
    SAME_BIAS,
    SHARED,
    FIRST_DENSE,
    NO_EXPERT_BIAS,
)
V3_CHOICE = (
    *EXPERTS[1:],
    Condition(lambda c: c.moe is None or c.moe.scores == "sigmoid", "moe.scores is sigmoid"),
    Condition(lambda c: c.moe is None or c.moe.bias_rate is not None, "moe.bias_rate is given"),
    _grouped_by("top2"),
)
V2_CHOICE = (
    *EXPERTS[1:],
    *SOFTMAX,
    Condition(lambda c: c.moe is None or not c.moe.normalise, "moe.normalise is false"),
    _grouped_by("max"),
)


def _windowed(config: ModelConfig) -> bool:
    return config.window is not None and "sliding" in config.layer_types


def all_sliding(config: ModelConfig) -> bool:
    """Return True if every layer has a sliding window."""
    return config.window is not None and set(config.layer_types) == {"sliding"}


ALL_ALIKE = Condition(lambda c: not _windowed(c) or all_sliding(c), "all layers have the same attention")
