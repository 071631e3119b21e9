"""The ``model`` section: what the user writes, and :class:`ModelConfig`, the same with nothing left open."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from partool.spec._base import Section
from partool.spec.numbers import (
    Experts,
    ExpertsOrNone,
    Factor,
    Heads,
    Layers,
    LayersOrNone,
    TokenId,
    Tokens,
    Vocabulary,
    Width,
)
from partool.spec.patterns import FilePath

AttentionKind = Literal["full", "sliding", "row", "column"]
"""full: all earlier tokens; sliding: a window of them; row and column: earlier ones of a token's row or column, where
tokens lie on a grid (arXiv 1912.12180)."""
Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"]
Position = Literal["rope", "learned", "none"]


class RopeScaling(Section):
    """Llama 3.1's frequency-dependent RoPE scaling (the ``rope_type: llama3`` of Hugging Face configurations)."""

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    low_freq_factor: Factor = 1.0
    high_freq_factor: Factor = 4.0
    original_max_position: Tokens


class LayerPattern(Section):
    """Attention kinds that repeat over the layers."""

    pattern: list[AttentionKind] = Field(min_length=1)


class Attention(Section):
    """Which layers attend to everything and which only to a window."""

    window: Tokens | None = None
    """Tokens a sliding layer sees, itself included."""
    grid: Annotated[list[Tokens], Field(min_length=2, max_length=2)] | None = None
    """[rows, columns] in which a sequence's tokens lie, row by row: frames and patches of a video."""
    layer_types: list[AttentionKind] | LayerPattern | None = None
    """One kind per layer, or a pattern that repeats. Default: all sliding if a window is given, else all full."""


class Moe(Section):
    """Mixture-of-experts feed-forward layers."""

    experts: Experts
    top_k: Experts
    ffn_hidden: Width
    """Width of one expert."""
    shared_experts: ExpertsOrNone = 0
    first_dense_layers: LayersOrNone = 0
    """Layers at the start that keep a dense feed-forward network."""
    every: Layers = 1
    """Every n-th layer has experts, counted after the first dense ones."""


class Mla(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: Width | None = None
    kv_rank: Width
    nope_head_dim: Width
    rope_head_dim: Width
    v_head_dim: Width


class Weights(Section):
    """Where the first weights come from."""

    source: Literal["init", "dummy", "checkpoint", "hf"] = "init"
    """init: drawn from the seed; dummy: constants, for dry runs; checkpoint: a partool checkpoint; hf: safetensors."""
    path: FilePath | None = None
    """Folder, for ``checkpoint`` and ``hf``."""


class ModelSpec(Section):
    """A preset, a Hugging Face ``config.json``, or the fields; fields override what the preset or the file says."""

    preset: str | None = None
    """Name from the catalog, such as llama3-8b."""
    config: FilePath | None = None
    """Path of a Hugging Face config.json, or of the folder that holds it; partool's own decoder is built from it."""
    hf: FilePath | None = None
    """Folder of a Hugging Face model, which transformers builds and partool trains as it is."""
    layers: Layers | None = None
    hidden: Width | None = None
    ffn_hidden: Width | None = None
    heads: Heads | None = None
    kv_heads: Heads | None = None
    head_dim: Width | None = None
    vocab: Vocabulary | None = None
    max_position: Tokens | None = None
    norm: Norm | None = None
    norm_eps: Factor | None = None
    activation: Activation | None = None
    position: Position | None = None
    rope_theta: Factor | None = None
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    ffn_bias: bool | None = None
    qk_norm: bool | None = None
    tied_embeddings: bool | None = None
    padding_token: TokenId | None = None
    """Token whose row of the embedding gets no gradient where it is looked up, as transformers does with
    pad_token_id."""
    attention: Attention | None = None
    moe: Moe | None = None
    mla: Mla | None = None
    init_std: Factor | None = None
    weights: Weights = Weights()
    frozen: list[str] = []
    """Glob patterns of parameter names that are not trained, such as ``embed.*``."""


class ModelConfig(Section):
    """A decoder with every field decided: what the planner prices and the runtime builds.

    Naming of parameters is given by :mod:`partool.layout.parameters`.
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
    position: Position = "rope"
    rope_theta: Factor = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    padding_token: TokenId | None = None
    """Its row of the embedding gets no gradient where it is looked up."""
    window: Tokens | None = None
    layer_types: tuple[AttentionKind, ...] = ()
    """One per layer; empty means all full."""
    grid: tuple[Tokens, Tokens] | None = None
    """Rows and columns in which a sequence's tokens lie."""
    moe: Moe | None = None
    mla: Mla | None = None
    init_std: Factor = 0.02

    @model_serializer(mode="wrap")
    def _only_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what checkpoints and plans of earlier versions do not have, where it says nothing."""
        fields: dict[str, Any] = dump(self)
        if self.padding_token is None:
            fields.pop("padding_token", None)
        return fields

    @property
    def gated(self) -> bool:
        """True if the feed-forward network has a gate projection."""
        return self.activation in ("swiglu", "geglu")

    def attention_kind(self, layer: int) -> AttentionKind:
        """Return the attention kind of a layer, counted from 0."""
        return self.layer_types[layer] if self.layer_types else "full"

    def is_moe_layer(self, layer: int) -> bool:
        """Return True if the feed-forward network of this layer (counted from 0) has experts."""
        if self.moe is None or layer < self.moe.first_dense_layers:
            return False
        return (layer - self.moe.first_dense_layers) % self.moe.every == 0
