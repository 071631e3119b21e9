"""The ``model`` section as the user writes it, and :class:`ModelConfig`, a model with every field decided."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from partool.spec._base import Section, shorthand
from partool.spec.adapter import LowRank
from partool.spec.experts import Moe
from partool.spec.numbers import (
    Depth,
    Factor,
    Heads,
    Layers,
    TokenId,
    Tokens,
    Vocabulary,
    Width,
)
from partool.spec.patterns import FilePath, ModuleName

AttentionKind = Literal["full", "sliding", "row", "column"]
"""full: all earlier tokens; sliding: a window of them; row, column: earlier tokens of the same row or column of a grid
(arXiv 1912.12180)."""
Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "geglu", "swiglu_clamped", "gelu", "gelu_tanh", "relu"]
"""The first three are gated. swiglu_clamped: (clamped up + 1) · g · sigmoid(α g), where g is the clamped gate."""
GATED = ("swiglu", "geglu", "swiglu_clamped")
"""Activations with a gate projection."""
Position = Literal["rope", "learned", "none"]


class RopeScaling(Section):
    """Scaling of RoPE's frequencies to longer sequences, by the rule of Llama 3.1 or by YaRN (arXiv 2309.00071)."""

    kind: Literal["llama3", "yarn"] = "llama3"
    """Name of the rule, which is the ``rope_type`` of Hugging Face configurations."""
    factor: Factor
    """Divisor of low frequencies."""
    low_freq_factor: Factor = 1.0
    """llama3: frequencies that turn fewer times than this within ``original_max_position`` are divided by
    ``factor``."""
    high_freq_factor: Factor = 4.0
    """llama3: frequencies that turn more often than this within ``original_max_position`` stay unchanged; frequencies
    between both limits are interpolated."""
    beta_fast: Factor = 32.0
    """yarn: dimensions that turn more often than this within ``original_max_position`` keep their frequency."""
    beta_slow: Factor = 1.0
    """yarn: frequencies of dimensions that turn fewer times than this are divided by ``factor``; dimensions between
    both limits are interpolated."""
    mscale: Factor | None = None
    """yarn: weight of ln ``factor`` in the scale of rotated queries and keys, if ``mscale_all_dim`` is given too;
    default 1."""
    mscale_all_dim: Factor | None = None
    """yarn: weight of ln ``factor`` by which the scale of rotated queries and keys is divided; in latent attention, the
    scale of all scores is multiplied by its square."""
    truncate: bool = True
    """yarn: whether the dimensions between both limits begin and end at whole pairs; GPT-OSS has false."""
    original_max_position: Tokens
    """Positions that the model was first trained with."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Fields that were given, but that the rule of this kind does not read."""
        others = _OF_LLAMA3 if self.kind == "yarn" else _OF_YARN
        return tuple(name for name in others if name in self.model_fields_set)

    @model_serializer(mode="wrap")
    def _only_read(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize the fields that the rule of this kind reads."""
        others = _OF_LLAMA3 if self.kind == "yarn" else _OF_YARN
        fields: dict[str, Any] = dump(self)
        if fields.get("truncate"):
            others = (*others, "truncate")
        return {name: value for name, value in fields.items() if name not in others}


_OF_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_OF_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


class LayerPattern(Section):
    """Attention kinds that repeat over the layers."""

    pattern: list[AttentionKind] = Field(min_length=1)
    """Kinds of attention of the first layers, repeated over all layers."""


class Attention(Section):
    """Attention of each layer: to all earlier tokens, to a window of them, or along an axis of a grid."""

    window: Tokens | None = None
    """Tokens that a token of a sliding layer attends to, itself included."""
    grid: Annotated[list[Tokens], Field(min_length=2, max_length=2)] | None = None
    """[rows, columns] of a sequence's tokens, stored row by row, such as frames and patches of a video."""
    layer_types: list[AttentionKind] | LayerPattern | None = None
    """One kind per layer, or a pattern that repeats. Default: all sliding if a window is given, else all full."""
    sinks: bool | None = None
    """Whether each head has a trained number that softmax counts as the score of one more key, whose value is zero
    (GPT-OSS; after arXiv 2309.17453). Default: as the preset or the file, else false."""


class Mla(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: Width | None = None
    """Width to which queries are compressed; null: queries are not compressed."""
    kv_rank: Width
    """Width to which keys and values are compressed together."""
    nope_head_dim: Width
    """Width of a head's part without positions."""
    rope_head_dim: Width
    """Width of a head's part that RoPE rotates; all heads share one such part of the key."""
    v_head_dim: Width
    """Width of a value head."""

    @property
    def qk_head_dim(self) -> int:
        """Return the width of a query head, and of a key head."""
        return self.nope_head_dim + self.rope_head_dim


class MultiToken(Section):
    """Modules that predict further tokens in training (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Each has a transformer block of its own, and shares embedding and head with the model.
    """

    depth: Depth = 1
    """Further tokens that each position predicts, one module for each."""


class Weights(Section):
    """Source of the initial weights."""

    source: Literal["init", "dummy", "checkpoint", "hf"] = "init"
    """init: drawn from the seed; dummy: cheap noise, for trials; checkpoint: a partool checkpoint; hf: safetensors."""
    path: FilePath | None = None
    """Folder, for ``checkpoint`` and ``hf``."""
    upcycle: bool = False
    """True: the folder holds a dense model, and each expert of a layer starts as a copy of that layer's network (sparse
    upcycling, arXiv 2212.05055); routers are drawn from the seed."""


class ModelSpec(Section):
    """A preset, a Hugging Face ``config.json``, or the fields; fields override the preset or the file.

    ``kv_heads``, ``ffn_hidden`` and ``head_dim`` of a preset or a file follow the fields that override it.
    """

    preset: str | None = None
    """Name from the catalog, such as llama3-8b."""
    config: FilePath | dict[str, Any] | None = None
    """Path of a Hugging Face config.json or of its folder, from which partool builds its own decoder; beside
    ``module``, the keywords of the module's constructor."""
    module: ModuleName | None = None
    """Class of a module of your own, ``package.module:Class``, whose forward pass maps tokens to logits."""
    hf: FilePath | None = None
    """Folder of a Hugging Face model that transformers builds and partool trains unchanged."""
    layers: Layers | None = None
    """Transformer blocks."""
    hidden: Width | None = None
    """Width of the residual stream."""
    ffn_hidden: Width | None = None
    """Inner width of the feed-forward network; default: 4 times ``hidden``, or with a gate 8/3 times, rounded up to a
    multiple of 64."""
    heads: Heads | None = None
    """Attention heads."""
    kv_heads: Heads | None = None
    """Heads of keys and values; default: ``heads``."""
    head_dim: Width | None = None
    """Width of a head; default: ``hidden`` over ``heads``, or with ``mla`` the sum of the two parts of a head."""
    vocab: Vocabulary | None = None
    """Size of the vocabulary; default: the tokenizer's."""
    max_position: Tokens | None = None
    """Longest sequence that the model has positions for; default 4096."""
    norm: Norm | None = None
    """Normalisation; default rmsnorm."""
    norm_eps: Factor | None = None
    """Constant added to the variance in norms; default 1e-5."""
    activation: Activation | None = None
    """Activation of the feed-forward network; swiglu, geglu and swiglu_clamped are gated; default swiglu."""
    swiglu_limit: Factor | None = None
    """swiglu_clamped: limit of both inputs, the gate's upwards and the other one's in both directions; default 7."""
    swiglu_alpha: Factor | None = None
    """swiglu_clamped: factor of the gate within the sigmoid; default 1.702."""
    position: Position | None = None
    """Positions: rope (rotates queries and keys), a learned embedding, or none; default rope."""
    rope_theta: Factor | None = None
    """Base of the rotations' wavelengths; default 10000."""
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool | None = None
    """Biases on the projections to queries, keys and values; default false."""
    out_bias: bool | None = None
    """A bias on attention's output projection; default false."""
    ffn_bias: bool | None = None
    """Biases in the feed-forward network; default false."""
    qk_norm: bool | None = None
    """Norms on each head of queries and keys; default false."""
    tied_embeddings: bool | None = None
    """True: the output matrix is the embedding; default false."""
    padding_token: TokenId | None = None
    """Token whose row of the embedding gets no gradient where it is looked up, as transformers does with
    pad_token_id."""
    attention: Attention | None = None
    moe: Moe | None = None
    mla: Mla | None = None
    multi_token: Annotated[MultiToken | None, BeforeValidator(shorthand("depth", int))] = None
    """Prediction of further tokens, whose losses ``training.multi_token_weight`` weighs; a number is the depth. A
    folder's modules for it are trained only where this is given."""
    init_std: Factor | None = None
    """Standard deviation of the initial weights; default 0.02."""
    weights: Weights = Weights()
    frozen: list[str] = []
    """Glob patterns of parameter names that are not trained, such as ``embed.*``."""

    @property
    def by_others(self) -> bool:
        """Whether other code than partool's own builds the model."""
        return self.hf is not None or self.module is not None


class ModelConfig(Section):
    """A decoder with every field decided; the planner predicts its cost and the runtime builds it.

    :mod:`partool.layout.parameters` lists the names of the decoder's parameters.
    """

    layers: Layers
    hidden: Width
    ffn_hidden: Width
    heads: Heads
    kv_heads: Heads
    head_dim: Width
    vocab: Vocabulary
    max_position: Tokens = 4096
    norm: Norm = "rmsnorm"
    norm_eps: Factor = 1e-5
    activation: Activation = "swiglu"
    swiglu_limit: Factor = 7.0
    swiglu_alpha: Factor = 1.702
    position: Position = "rope"
    rope_theta: Factor = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    padding_token: TokenId | None = None
    """Token whose row of the embedding gets no gradient where it is looked up."""
    window: Tokens | None = None
    layer_types: tuple[AttentionKind, ...] = ()
    """Attention kind of each layer; empty means that all layers have full attention."""
    grid: tuple[Tokens, Tokens] | None = None
    """Rows and columns of a sequence's tokens."""
    sinks: bool = False
    """Whether softmax counts a trained number of each head as the score of one more key."""
    moe: Moe | None = None
    mla: Mla | None = None
    multi_token: MultiToken | None = None
    init_std: Factor = 0.02
    adapter: LowRank | None = None
    """Matrices that are trained beside those of the model."""

    @model_serializer(mode="wrap")
    def _only_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize the model without fields that say nothing and that earlier versions of partool did not know."""
        fields: dict[str, Any] = dump(self)
        unread = () if self.activation == "swiglu_clamped" else ("swiglu_limit", "swiglu_alpha")
        for name in (*unread, *(() if self.sinks else ("sinks",))):
            fields.pop(name, None)
        for name in ("padding_token", "adapter", "multi_token"):
            if fields.get(name) is None:
                fields.pop(name, None)
        return fields

    @property
    def gated(self) -> bool:
        """True if the feed-forward network has a gate projection."""
        return self.activation in GATED

    @property
    def rotated(self) -> int:
        """Return the width of the part of a head that RoPE rotates."""
        return self.mla.rope_head_dim if self.mla is not None else self.head_dim

    @property
    def predictions(self) -> int:
        """Number of modules that predict further tokens."""
        return 0 if self.multi_token is None else self.multi_token.depth

    @property
    def blocks(self) -> int:
        """Number of transformer blocks: the layers, and after them those of the modules that predict further tokens."""
        return self.layers + self.predictions

    def attention_kind(self, layer: int) -> AttentionKind:
        """Return the attention kind of a block, counted from 0; blocks after the last layer are like that layer."""
        return self.layer_types[min(layer, len(self.layer_types) - 1)] if self.layer_types else "full"

    def is_moe_layer(self, layer: int) -> bool:
        """Return True if the feed-forward network of this layer (counted from 0) has experts."""
        return self.moe is not None and self.moe.has_experts(layer)

    @property
    def expert_shapes(self) -> tuple[ModelConfig, ...]:
        """Models with one sort of layers of experts each: those of this model, in the order of its layers.

        Without pyramids of experts that is the model itself.
        """
        return _shapes(self)[0] if self.moe is not None and self.moe.layers else (self,)

    def expert_shape(self, layer: int) -> int:
        """Return the place in ``expert_shapes`` of a layer's experts; 0 for a dense layer."""
        return _shapes(self)[1][layer] if self.moe is not None and self.moe.layers else 0

    @property
    def expert_numbers(self) -> tuple[int, ...]:
        """Numbers of experts of layers, each once; empty for a dense model."""
        return tuple(dict.fromkeys(shape.moe.experts for shape in self.expert_shapes if shape.moe))

    @property
    def expert_widths(self) -> tuple[int, ...]:
        """Widths of the experts of layers, each once; empty for a dense model."""
        return tuple(dict.fromkeys(shape.moe.ffn_hidden for shape in self.expert_shapes if shape.moe))

    def of_layer(self, layer: int) -> ModelConfig:
        """Return the model whose layers of experts are all as this layer, counted from 0."""
        return self.expert_shapes[self.expert_shape(layer)]


@lru_cache(maxsize=64)
def _shapes(model: ModelConfig) -> tuple[tuple[ModelConfig, ...], tuple[int, ...]]:
    """Return the models of :attr:`ModelConfig.expert_shapes`, and for each layer the place of its experts there."""
    assert model.moe is not None, "a dense model"
    shapes: list[Moe] = []
    places = [0] * model.layers
    for layer in filter(model.is_moe_layer, range(model.layers)):
        moe = model.moe.of_layer(layer)
        if moe not in shapes:
            shapes.append(moe)
        places[layer] = shapes.index(moe)
    shapes = shapes or [model.moe.of_layer(0)]
    return tuple(model.model_copy(update={"moe": moe}) for moe in shapes), tuple(places)
