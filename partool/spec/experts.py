"""The section ``model.moe``: layers of experts, whose number, choice and width may differ by layer.

The latter are pyramids of experts (DeepSpeed-MoE, arXiv 2201.05596, section 4.1.1). A key of ``model.moe.layers`` is a
layer or an inclusive range of layers, counted from 0: ``"11"`` or ``"12-23"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, SerializerFunctionWrapHandler, model_serializer

from partool.spec._base import Section
from partool.spec.numbers import Coefficient, Experts, ExpertsOrNone, Factor, Layers, LayersOrNone, Width

_KEY = re.compile(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?", re.ASCII)


class ExpertShape(Section):
    """What layers of experts have instead of the values that ``model.moe`` gives for all; at least one field."""

    experts: Experts | None = None
    """Routed experts of each of these layers."""
    top_k: Experts | None = None
    """Experts of each of these layers that a token is sent to."""
    ffn_hidden: Width | None = None
    """Width of one expert of these layers."""

    @property
    def given(self) -> dict[str, Any]:
        """Return the fields that have a value."""
        return {name: value for name, value in self if value is not None}


class _Shapes(dict[str, ExpertShape]):
    """A dictionary that nothing changes after loading, so that sections which hold it have a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


ShapesOfLayers = Annotated[dict[str, ExpertShape], AfterValidator(_Shapes)]


def layer_range(key: str) -> range | None:
    """Return the layers that a key of ``model.moe.layers`` names; None if it is no layer and no range of layers."""
    match = _KEY.fullmatch(key.strip())
    if match is None:
        return None
    first, last = int(match[1]), int(match[2] or match[1])
    return range(first, last + 1) if first <= last else None


def ranges(shapes: dict[str, ExpertShape] | None) -> Iterator[tuple[str, range, ExpertShape]]:
    """Yield (key, layers, shape) of each key that can be read, the first layers first."""
    readable = [(layers, key) for key in shapes or {} if (layers := layer_range(key)) is not None]
    for layers, key in sorted(readable, key=lambda one: (one[0].start, one[0].stop)):
        yield key, layers, (shapes or {})[key]


Scores = Literal["softmax", "sigmoid"]
"""Function from a router's logits to scores: over all experts of a token, or of each expert by itself."""
GroupScore = Literal["top2", "max"]
"""Score of a group of experts: the sum of its two highest scores (DeepSeek-V3), or its highest score (DeepSeek-V2)."""
BalanceScope = Literal["micro_batch", "sequence", "global_batch"]
"""Tokens over which the experts' shares of the load are counted: those of a data-parallel rank's micro-batch, of each
sequence, or of the micro-batches of all ranks so far in the step (arXiv 2501.11873)."""


class Moe(Section):
    """Mixture-of-experts feed-forward layers, and how their routers choose and balance experts."""

    experts: Experts
    """Routed experts per layer."""
    top_k: Experts
    """Experts that each token is sent to."""
    ffn_hidden: Width
    """Width of one expert."""
    shared_experts: ExpertsOrNone = 0
    """Experts that every token is sent to in addition."""
    residual: bool = False
    """Whether a layer's result is c0 · routed experts + c1 · shared experts instead of their sum; c is a softmax of two
    logits per token (residual experts of DeepSpeed-MoE, arXiv 2201.05596, section 4.1.1)."""
    first_dense_layers: LayersOrNone = 0
    """Layers at the start that keep a dense feed-forward network."""
    every: Layers = 1
    """Every n-th layer has experts, counted after the first dense ones."""
    scores: Scores = "softmax"
    """softmax over all experts, or a sigmoid of each (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    normalise: bool = True
    """Whether the weights of a token's chosen experts are divided by their sum."""
    scaling_factor: Factor = 1.0
    """Factor of the weights after that (``routed_scaling_factor`` of Hugging Face configurations)."""
    groups: Experts = 1
    """Number of groups of consecutive experts; a token chooses experts of only ``top_groups`` groups."""
    top_groups: Experts = 1
    """Groups that a token may choose from."""
    group_score: GroupScore = "top2"
    """How a group is scored."""
    bias_rate: Coefficient | None = None
    """Change of the router's selection bias per step, up for experts with less than the mean load, down for others
    (arXiv 2408.15664); 0 keeps the bias as it is, null: there is no bias."""
    aux_loss: Coefficient = 0.0
    """Coefficient of the load-balancing loss of each layer, which is 1 if tokens are spread evenly; the coefficients of
    Hugging Face configurations are for one loss of all layers, which is ``top_k`` there."""
    aux_scope: BalanceScope = "micro_batch"
    """Tokens over which the load-balancing loss counts the experts' load."""
    z_loss: Coefficient = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE, arXiv 2202.08906)."""
    capacity: Factor | None = None
    """Most tokens of an expert, as a multiple of the mean, within a data-parallel rank's micro-batch; the choices of
    later tokens are dropped. null: none are dropped."""
    routing: Literal["learned", "balanced"] = "learned"
    """learned: by the router; balanced: experts in turn, whatever the router says, for benchmarks only."""
    bias: bool = False
    """Biases in routers' logits, and in the projections of routed experts (GPT-OSS)."""
    layers: ShapesOfLayers | None = None
    """Layers that have another number of experts, another ``top_k`` or experts of another width: a layer or an
    inclusive range of layers, counted from 0, such as ``"12-23": {experts: 128}`` (pyramids of experts of
    DeepSpeed-MoE, arXiv 2201.05596, section 4.1.1)."""

    def has_experts(self, layer: int) -> bool:
        """Return True if the feed-forward network of this layer (counted from 0) has experts."""
        return layer >= self.first_dense_layers and (layer - self.first_dense_layers) % self.every == 0

    def of_layer(self, layer: int) -> Moe:
        """Return the experts of one layer, counted from 0, as those of a model whose layers are all alike."""
        given = next((shape.given for _, layers, shape in ranges(self.layers) if layer in layers), {})
        return self.model_copy(update={"layers": None, **given})

    @model_serializer(mode="wrap")
    def _only_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize the section without fields that say nothing and that earlier versions of partool did not know."""
        fields: dict[str, Any] = dump(self)
        unsaid = (*(() if self.bias else ("bias",)), *(() if self.layers else ("layers",)))
        return {name: value for name, value in fields.items() if name not in unsaid}
