"""Hugging Face model types: which configurations they can express, and where they store parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from partool.spec.experts import GroupScore
from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.places import (
    GPT2_PLACES,
    LATENT_PLACES,
    LLAMA_PLACES,
    QK_NORM_PLACES,
    SELECTION_BIAS_PLACES,
    ParameterPlace,
    expert_places,
)


class Condition(NamedTuple):
    """A requirement that a family places on a configuration."""

    holds: Callable[[ModelConfig], bool]
    text: str


@dataclass(frozen=True, slots=True)
class Family:
    """A Hugging Face model type."""

    model_type: str
    architecture: str
    prefix: str
    """Prefix of all names except the head's; a folder saved from the base model alone lacks this prefix."""
    places: dict[str, ParameterPlace]
    """Places of parameters, by partool's names without the endings ``.weight`` and ``.bias``; ``{i}`` is the layer.

    A name with its ending comes before one without, and its place has the ending.
    """
    conditions: tuple[Condition, ...]
    ignored: tuple[str, ...] = ()
    """Endings of the names of tensors that are in folders but are not parameters."""


_ROPE_RMSNORM_GATED = (
    Condition(lambda c: c.norm == "rmsnorm", "norm is rmsnorm"),
    Condition(lambda c: c.position == "rope", "position is rope"),
    Condition(lambda c: c.gated, "activation is swiglu or geglu"),
)
_NOT_LATENT = Condition(lambda c: c.mla is None, "there is no latent attention")


def _grouped_by(score: GroupScore) -> Condition:
    return Condition(
        lambda c: c.moe is None or c.moe.groups == 1 or c.moe.group_score == score, f"moe.group_score is {score}"
    )


_DENSE = Condition(lambda c: c.moe is None, "there are no experts")
_EXPERTS = (
    Condition(lambda c: c.moe is not None, "there are experts"),
    Condition(lambda c: c.moe is None or c.moe.routing == "learned", "moe.routing is learned"),
    Condition(lambda c: c.moe is None or c.moe.layers is None, "moe.layers is not given: all experts are alike"),
)
_NO_SHARED = Condition(lambda c: c.moe is None or not c.moe.shared_experts, "moe.shared_experts is 0")
_SHARED = Condition(
    lambda c: c.moe is None or (c.moe.shared_experts > 0 and not c.moe.residual),
    "moe.shared_experts is at least 1, and moe.residual false",
)
_FIRST_DENSE = Condition(lambda c: c.moe is None or c.moe.every == 1, "moe.every is 1")
_SOFTMAX = (
    Condition(lambda c: c.moe is None or c.moe.scores == "softmax", "moe.scores is softmax"),
    Condition(lambda c: c.moe is None or c.moe.bias_rate is None, "moe.bias_rate is null"),
)
_PLAIN_CHOICE = (
    *_SOFTMAX,
    Condition(lambda c: c.moe is None or c.moe.groups == 1, "moe.groups is 1"),
    Condition(lambda c: c.moe is None or c.moe.scaling_factor == 1.0, "moe.scaling_factor is 1"),
    _NO_SHARED,
)
_LATENT = (
    Condition(lambda c: c.mla is not None, "attention is latent (mla)"),
    *_ROPE_RMSNORM_GATED[:2],
    Condition(lambda c: c.activation == "swiglu", "activation is swiglu"),
    Condition(
        lambda c: not (c.qkv_bias and c.mla is not None and c.mla.q_rank is None), "qkv_bias is false without q_rank"
    ),
)
_QK_NORM = Condition(lambda c: c.qk_norm, "qk_norm is true")
_NO_QK_NORM = Condition(lambda c: not c.qk_norm, "qk_norm is false")
_NO_WINDOW = Condition(lambda c: not _windowed(c), "no layer has a sliding window")
_NO_AXES = Condition(lambda c: not {"row", "column"} & set(c.layer_types), "no layer attends along rows or columns")
_NO_FFN_BIAS = Condition(lambda c: not c.ffn_bias, "ffn_bias is false")
_NO_ATTENTION_BIAS = Condition(lambda c: not c.qkv_bias and not c.out_bias, "qkv_bias and out_bias are false")
_SAME_BIAS = Condition(lambda c: c.qkv_bias == c.out_bias, "qkv_bias equals out_bias")
_DEEPSEEK = (*_LATENT, _NO_QK_NORM, _NO_WINDOW, _NO_AXES, _NO_FFN_BIAS, _SAME_BIAS, _SHARED, _FIRST_DENSE)
_V3_CHOICE = (
    *_EXPERTS[1:],
    Condition(lambda c: c.moe is None or c.moe.scores == "sigmoid", "moe.scores is sigmoid"),
    Condition(lambda c: c.moe is None or c.moe.bias_rate is not None, "moe.bias_rate is given"),
    _grouped_by("top2"),
)
_V2_CHOICE = (
    *_EXPERTS[1:],
    *_SOFTMAX,
    Condition(lambda c: c.moe is None or not c.moe.normalise, "moe.normalise is false"),
    _grouped_by("max"),
)


def _windowed(config: ModelConfig) -> bool:
    return config.window is not None and "sliding" in config.layer_types


def all_sliding(config: ModelConfig) -> bool:
    """Return True if every layer has a sliding window."""
    return config.window is not None and set(config.layer_types) == {"sliding"}


_ALL_ALIKE = Condition(lambda c: not _windowed(c) or all_sliding(c), "all layers have the same attention")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            "model.",
            LLAMA_PLACES,
            (*_ROPE_RMSNORM_GATED, _DENSE, _NOT_LATENT, _NO_QK_NORM, _NO_WINDOW, _NO_AXES, _SAME_BIAS),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            "model.",
            LLAMA_PLACES,
            (
                *_ROPE_RMSNORM_GATED,
                _DENSE,
                _NOT_LATENT,
                _NO_QK_NORM,
                _NO_AXES,
                _NO_FFN_BIAS,
                _NO_ATTENTION_BIAS,
                _ALL_ALIKE,
            ),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            "model.",
            LLAMA_PLACES,
            (
                *_ROPE_RMSNORM_GATED,
                _DENSE,
                _NOT_LATENT,
                _NO_QK_NORM,
                _NO_AXES,
                _NO_FFN_BIAS,
                Condition(lambda c: c.qkv_bias and not c.out_bias, "qkv_bias is true and out_bias false"),
            ),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            "model.",
            LLAMA_PLACES | QK_NORM_PLACES,
            (
                *_ROPE_RMSNORM_GATED,
                _DENSE,
                _NOT_LATENT,
                _QK_NORM,
                _NO_AXES,
                _NO_FFN_BIAS,
                _SAME_BIAS,
            ),
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            "transformer.",
            GPT2_PLACES,
            (
                _DENSE,
                _NOT_LATENT,
                Condition(lambda c: c.norm == "layernorm", "norm is layernorm"),
                Condition(lambda c: c.position == "learned", "position is learned"),
                Condition(lambda c: not c.gated, "activation is gelu, gelu_tanh or relu"),
                Condition(
                    lambda c: c.qkv_bias and c.out_bias and c.ffn_bias, "qkv_bias, out_bias and ffn_bias are true"
                ),
                Condition(lambda c: c.kv_heads == c.heads, "kv_heads equals heads"),
                Condition(lambda c: c.head_dim * c.heads == c.hidden, "head_dim times heads is hidden"),
                _NO_QK_NORM,
                _NO_WINDOW,
                _NO_AXES,
            ),
            (".attn.bias", ".attn.masked_bias"),
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "model.",
            LLAMA_PLACES | expert_places("mixtral"),
            (
                *_ROPE_RMSNORM_GATED,
                *_EXPERTS,
                *_PLAIN_CHOICE,
                Condition(lambda c: c.moe is None or c.moe.normalise, "moe.normalise is true"),
                Condition(lambda c: all(map(c.is_moe_layer, range(c.layers))), "all layers have experts"),
                _NOT_LATENT,
                _NO_QK_NORM,
                _NO_AXES,
                _NO_ATTENTION_BIAS,
                _ALL_ALIKE,
            ),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "model.",
            LLAMA_PLACES | QK_NORM_PLACES | expert_places("qwen3_moe"),
            (
                *_ROPE_RMSNORM_GATED,
                *_EXPERTS,
                *_PLAIN_CHOICE,
                _NOT_LATENT,
                _QK_NORM,
                _NO_AXES,
                _NO_FFN_BIAS,
                _SAME_BIAS,
                _ALL_ALIKE,
            ),
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "model.",
            LLAMA_PLACES | LATENT_PLACES | expert_places("deepseek_v3") | SELECTION_BIAS_PLACES,
            (*_DEEPSEEK, *_V3_CHOICE),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            "model.",
            LLAMA_PLACES | LATENT_PLACES | expert_places("deepseek_v2"),
            (*_DEEPSEEK, *_V2_CHOICE),
            ("rotary_emb.inv_freq",),
        ),
    )
}
"""Families by ``model_type``, in the order in which :func:`family_of` tries them."""


def family_of(config: ModelConfig) -> Family:
    """Return the first family that can express the configuration.

    Raises ConfigurationError PT624, listing the requirements of each family.
    """
    unmet = {}
    for family in FAMILIES.values():
        unmet[family.model_type] = [condition.text for condition in family.conditions if not condition.holds(config)]
        if not unmet[family.model_type]:
            return family
    nearest = min(unmet, key=lambda model_type: len(unmet[model_type]))
    needs = "; ".join(f"{model_type}: {', '.join(texts)}" for model_type, texts in unmet.items())
    raise ConfigurationError(
        "PT624",
        f"no Hugging Face model type can express this model; each would need: {needs}",
        f"{nearest} comes closest.",
    )


def place_of(family: Family, name: str) -> ParameterPlace | None:
    """Return the place of a parameter (``layers.3.attention.q.weight``) with layer and ending, or None if unknown."""
    stem, _, ending = name.rpartition(".")
    layer = ""
    if stem.startswith("layers."):
        _, layer, rest = stem.split(".", 2)
        stem = "layers.{i}." + rest
    if (place := family.places.get(f"{stem}.{ending}")) is not None:
        return place._replace(name=place.name.replace("{i}", layer))
    place = family.places.get(stem)
    if place is None:
        return None
    # Only matrices are transposed: biases and norms have one dimension, GPT-2's embeddings are not Conv1D.
    transposed = place.transposed and ending == "weight"
    stack = place.stack.replace("{i}", layer)
    return place._replace(name=f"{place.name.replace('{i}', layer)}.{ending}", transposed=transposed, stack=stack)
