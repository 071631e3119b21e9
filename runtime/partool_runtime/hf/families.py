"""Hugging Face model types: which configurations they can express, and where they store parameters."""

from __future__ import annotations

from dataclasses import dataclass

from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import conditions as need
from partool_runtime.hf.places import (
    GPT2_PLACES,
    GPT_OSS_PLACES,
    LATENT_PLACES,
    LLAMA_PLACES,
    PREDICTION_PLACES,
    QK_NORM_PLACES,
    SELECTION_BIAS_PLACES,
    ParameterPlace,
    expert_places,
)


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
    conditions: tuple[need.Condition, ...]
    ignored: tuple[str, ...] = ()
    """Endings of the names of tensors that are in folders but are not parameters."""

    @property
    def predicts(self) -> bool:
        """Whether folders have modules for further tokens."""
        return PREDICTION_PLACES.keys() <= self.places.keys()


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            "model.",
            LLAMA_PLACES,
            (
                *need.ROPE_RMSNORM_GATED,
                need.DENSE,
                need.NOT_LATENT,
                need.NO_QK_NORM,
                need.NO_WINDOW,
                need.NO_AXES,
                need.SAME_BIAS,
            ),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            "model.",
            LLAMA_PLACES,
            (
                *need.ROPE_RMSNORM_GATED,
                need.DENSE,
                need.NOT_LATENT,
                need.NO_QK_NORM,
                need.NO_AXES,
                need.NO_FFN_BIAS,
                need.NO_ATTENTION_BIAS,
                need.ALL_ALIKE,
            ),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            "model.",
            LLAMA_PLACES,
            (
                *need.ROPE_RMSNORM_GATED,
                need.DENSE,
                need.NOT_LATENT,
                need.NO_QK_NORM,
                need.NO_AXES,
                need.NO_FFN_BIAS,
                need.Condition(lambda c: c.qkv_bias and not c.out_bias, "qkv_bias is true and out_bias false"),
            ),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            "model.",
            LLAMA_PLACES | QK_NORM_PLACES,
            (
                *need.ROPE_RMSNORM_GATED,
                need.DENSE,
                need.NOT_LATENT,
                need.QK_NORM,
                need.NO_AXES,
                need.NO_FFN_BIAS,
                need.SAME_BIAS,
            ),
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            "transformer.",
            GPT2_PLACES,
            (
                need.DENSE,
                need.NOT_LATENT,
                need.Condition(lambda c: c.norm == "layernorm", "norm is layernorm"),
                need.Condition(lambda c: c.position == "learned", "position is learned"),
                need.ROPE_RMSNORM_GATED[3],
                need.Condition(lambda c: not c.gated, "activation is gelu, gelu_tanh or relu"),
                need.Condition(
                    lambda c: c.qkv_bias and c.out_bias and c.ffn_bias, "qkv_bias, out_bias and ffn_bias are true"
                ),
                need.Condition(lambda c: c.kv_heads == c.heads, "kv_heads equals heads"),
                need.Condition(lambda c: c.head_dim * c.heads == c.hidden, "head_dim times heads is hidden"),
                need.NO_QK_NORM,
                need.NO_WINDOW,
                need.NO_AXES,
            ),
            (".attn.bias", ".attn.masked_bias"),
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "model.",
            LLAMA_PLACES | expert_places("mixtral"),
            (
                *need.ROPE_RMSNORM_GATED,
                *need.EXPERTS,
                *need.PLAIN_CHOICE,
                need.NO_EXPERT_BIAS,
                *need.NORMALISED_EVERYWHERE,
                need.NOT_LATENT,
                need.NO_QK_NORM,
                need.NO_AXES,
                need.NO_ATTENTION_BIAS,
                need.ALL_ALIKE,
            ),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "model.",
            LLAMA_PLACES | QK_NORM_PLACES | expert_places("qwen3_moe"),
            (
                *need.ROPE_RMSNORM_GATED,
                *need.EXPERTS,
                *need.PLAIN_CHOICE,
                need.NO_EXPERT_BIAS,
                need.NOT_LATENT,
                need.QK_NORM,
                need.NO_AXES,
                need.NO_FFN_BIAS,
                need.SAME_BIAS,
                need.ALL_ALIKE,
            ),
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "model.",
            LLAMA_PLACES | LATENT_PLACES | expert_places("deepseek_v3") | SELECTION_BIAS_PLACES | PREDICTION_PLACES,
            (*need.DEEPSEEK, *need.V3_CHOICE),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            "model.",
            LLAMA_PLACES | LATENT_PLACES | expert_places("deepseek_v2"),
            (*need.DEEPSEEK, *need.V2_CHOICE),
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            "model.",
            LLAMA_PLACES | GPT_OSS_PLACES,
            (
                *need.ROPE_RMSNORM_GATED[:2],
                need.Condition(lambda c: c.activation == "swiglu_clamped", "activation is swiglu_clamped"),
                need.Condition(lambda c: c.sinks, "attention.sinks is true"),
                *need.EXPERTS,
                *need.PLAIN_CHOICE,
                need.Condition(lambda c: c.moe is None or c.moe.bias, "moe.bias is true"),
                *need.NORMALISED_EVERYWHERE,
                need.NOT_LATENT,
                need.NO_QK_NORM,
                need.NO_AXES,
                need.SAME_BIAS,
            ),
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


def place_of(family: Family, name: str, layers: int = 0) -> ParameterPlace | None:
    """Return the place of a parameter (``layers.3.attention.q.weight``) with layer and ending, or None if unknown.

    ``layers`` is the number of the model's layers, after which folders number its modules of further tokens.
    """
    stem, _, ending = name.rpartition(".")
    layer = ""
    if stem.startswith("layers."):
        _, layer, rest = stem.split(".", 2)
        stem = "layers.{i}." + rest
    elif stem.startswith("predictions."):
        _, number, rest = stem.split(".", 2)
        layer, stem = str(layers + int(number)), "predictions.{p}." + rest
    if (place := family.places.get(f"{stem}.{ending}")) is not None:
        return place._replace(name=place.name.replace("{i}", layer))
    place = family.places.get(stem)
    if place is None:
        return None
    # Only matrices are transposed: biases and norms have one dimension, GPT-2's embeddings are not Conv1D.
    transposed = place.transposed and ending == "weight"
    stack = place.stack.replace("{i}", layer)
    return place._replace(name=f"{place.name.replace('{i}', layer)}.{ending}", transposed=transposed, stack=stack)
