"""The parameters of a decoder as pure data: the planner counts them, and the runtime's modules must match them.

Names follow docs/design/architecture.md. The rows of a layer's experts are stacked in one matrix per projection, so
that any number of ranks can share experts: ``layers.{i}.moe.experts.{gate,up}.weight [E·F,H]``, expert after expert,
and ``layers.{i}.moe.experts.down.weight [E·H,F]``; their biases are stacked likewise, ``[E·F]`` and ``[E·H]``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

from partool.layout.adapters import added, frozen_beside, is_target
from partool.spec.adapter import AdapterSpec, LowRank
from partool.spec.model import ModelConfig

ParameterKind = Literal["embedding", "position", "norm", "attention", "ffn", "router", "expert", "head", "prediction"]


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One parameter. ``decay`` is True if weight decay applies to it: True for matrices, False for norms and biases."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    kind: ParameterKind
    decay: bool

    @property
    def elements(self) -> int:
        """Return the number of elements of the parameter."""
        return prod(self.shape)


def parameters(config: ModelConfig) -> list[ParameterInfo]:
    """Return every parameter of the model, in the order of the modules; a tied head is not listed."""
    infos = [_info("embed.weight", (config.vocab, config.hidden), None, "embedding")]
    if config.position == "learned":
        infos.append(_info("position.weight", (config.max_position, config.hidden), None, "position"))
    for layer in range(config.blocks):
        infos.extend(layer_parameters(config, layer))
    infos.extend(_norm("final_norm", config, None))
    if not config.tied_embeddings:
        infos.append(_info("head.weight", (config.vocab, config.hidden), None, "head"))
    for number in range(config.predictions):
        infos.extend(_prediction(f"predictions.{number}", config))
    return infos


def _prediction(prefix: str, config: ModelConfig) -> Iterator[ParameterInfo]:
    """Yield what a module that predicts a further token has beside its block (arXiv 2412.19437, section 2.2)."""
    yield from _norm(f"{prefix}.embedding_norm", config, None)
    yield from _norm(f"{prefix}.hidden_norm", config, None)
    yield _info(f"{prefix}.projection.weight", (config.hidden, 2 * config.hidden), None, "prediction")
    yield from _norm(f"{prefix}.final_norm", config, None)


def layer_parameters(config: ModelConfig, layer: int) -> list[ParameterInfo]:
    """Return the parameters of one layer; layers are counted from 0."""
    prefix, config = f"layers.{layer}", config.of_layer(layer)
    attention = _latent_attention if config.mla else _attention
    network = _experts if config.is_moe_layer(layer) else _ffn
    infos = [
        *_norm(f"{prefix}.attention_norm", config, layer),
        *attention(f"{prefix}.attention", config, layer),
        *_norm(f"{prefix}.ffn_norm", config, layer),
        *network(prefix, config, layer),
    ]
    return infos if config.adapter is None else list(_with_adapter(infos, config, config.adapter))


def _with_adapter(infos: Sequence[ParameterInfo], config: ModelConfig, adapter: LowRank) -> Iterator[ParameterInfo]:
    """Yield the parameters of a layer, and behind those of each projection the matrices that an adapter adds."""
    matrices = {name: info for info in infos if (name := projection_of(info)) is not None and is_target(adapter, name)}
    names = {info.name for info in infos}
    for info in infos:
        yield info
        projection, _, ending = info.name.rpartition(".")
        if projection not in matrices or (ending == "weight" and f"{projection}.bias" in names):
            continue
        weight = matrices[projection]
        experts = config.moe.experts if weight.kind == "expert" and config.moe is not None else 1
        for name, shape in added(adapter, projection, (weight.shape[0], weight.shape[1]), experts):
            yield _info(name, shape, weight.layer, weight.kind)


def projection_of(info: ParameterInfo) -> str | None:
    """Return the name of the projection whose matrix a parameter is; None for any other parameter."""
    of_projection = info.kind in ("attention", "ffn", "expert") and info.name.endswith(".weight")
    return info.name.removesuffix(".weight") if of_projection else None


def groups(config: ModelConfig) -> list[list[ParameterInfo]]:
    """Return the parameters in groups, each of which is all-gathered as a whole.

    The groups are the embeddings, each block, and the final norm with the head and what predictions of further tokens
    have beside their blocks.
    """
    infos = parameters(config)
    first = [info for info in infos if info.kind in ("embedding", "position")]
    layers: list[list[ParameterInfo]] = [[] for _ in range(config.blocks)]
    last = []
    for info in infos:
        if info.layer is not None:
            layers[info.layer].append(info)
        elif info.kind not in ("embedding", "position"):
            last.append(info)
    return [first, *layers, last]


def is_frozen(name: str, patterns: Iterable[str]) -> bool:
    """Return True if the optimizer does not train a parameter, as its name matches a pattern of ``model.frozen``.

    The selection biases of routers have no gradient: the load of experts changes them (:func:`is_selection_bias`).
    """
    return is_selection_bias(name) or any(fnmatchcase(name, pattern) for pattern in patterns)


def is_selection_bias(name: str) -> bool:
    """Return True if a parameter is what a router adds to its scores to choose experts (arXiv 2408.15664)."""
    return name.endswith(".moe.router.bias")


LOGIT_BIAS, SINKS = "logit_bias", "sinks"
"""Endings of the names of what a router adds to its logits, and of attention's sinks."""


def frozen_problem(names: Collection[str], patterns: Sequence[str]) -> tuple[int | None, str] | None:
    """Return why glob patterns of ``model.frozen`` cannot be meant, with the index of a pattern; None if they can.

    A pattern that matches no name is misspelt (its index is returned); patterns that match all names leave nothing to
    train (the index is None).
    """
    for index, pattern in enumerate(patterns):
        if not any(fnmatchcase(name, pattern) for name in names):
            return index, f"model.frozen: {pattern!r} matches no parameter"
    if patterns and all(is_frozen(name, patterns) for name in names):
        return None, "model.frozen: the patterns match every parameter, nothing would be trained"
    return None


def priced_frozen(
    model: ModelConfig, frozen: tuple[str, ...], adapter: AdapterSpec | None, *, partools: bool
) -> tuple[str, ...]:
    """Return the patterns of what is not trained, by the names of the model that predictions are of.

    These are the names of ``frozen`` where the decoder is ``partools``. Models that other code builds have other
    names, and are priced as the nearest of partool's.
    """
    if partools or adapter is None:
        return frozen
    return frozen_beside([info.name for info in parameters(model)], adapter.train)


def group_of(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first of the glob patterns of ``optimizer.groups`` that a parameter's name matches."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def count(infos: Iterable[ParameterInfo]) -> int:
    """Return the number of elements of all parameters."""
    return sum(info.elements for info in infos)


def _info(name: str, shape: tuple[int, ...], layer: int | None, kind: ParameterKind) -> ParameterInfo:
    return ParameterInfo(name, shape, layer, kind, decay=len(shape) > 1)


def _norm(name: str, config: ModelConfig, layer: int | None) -> Iterator[ParameterInfo]:
    yield _info(f"{name}.weight", (config.hidden,), layer, "norm")
    if config.norm == "layernorm":
        yield _info(f"{name}.bias", (config.hidden,), layer, "norm")


def _linear(name: str, shape: tuple[int, int], bias: bool, layer: int, kind: ParameterKind) -> Iterator[ParameterInfo]:
    yield _info(f"{name}.weight", shape, layer, kind)
    if bias:
        yield _info(f"{name}.bias", shape[:1], layer, kind)


def _attention(prefix: str, config: ModelConfig, layer: int) -> Iterator[ParameterInfo]:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if config.sinks:
        yield _info(f"{prefix}.{SINKS}", (config.heads,), layer, "attention")
    for name, width in (("q", query), ("k", key), ("v", key)):
        yield from _linear(f"{prefix}.{name}", (width, config.hidden), config.qkv_bias, layer, "attention")
    yield from _linear(f"{prefix}.o", (config.hidden, query), config.out_bias, layer, "attention")
    if config.qk_norm:
        for name in ("q", "k"):
            yield _info(f"{prefix}.{name}_norm.weight", (config.head_dim,), layer, "norm")


def _latent_attention(prefix: str, config: ModelConfig, layer: int) -> Iterator[ParameterInfo]:
    """Yield the projections of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C)."""
    mla = config.mla
    if mla is None:
        return
    query = config.heads * (mla.nope_head_dim + mla.rope_head_dim)
    if mla.q_rank is None:
        yield from _linear(f"{prefix}.q", (query, config.hidden), config.qkv_bias, layer, "attention")
    else:
        yield from _linear(f"{prefix}.q_a", (mla.q_rank, config.hidden), config.qkv_bias, layer, "attention")
        yield _info(f"{prefix}.q_a_norm.weight", (mla.q_rank,), layer, "norm")
        yield from _linear(f"{prefix}.q_b", (query, mla.q_rank), False, layer, "attention")
    latent = mla.kv_rank + mla.rope_head_dim
    yield from _linear(f"{prefix}.kv_a", (latent, config.hidden), config.qkv_bias, layer, "attention")
    yield _info(f"{prefix}.kv_a_norm.weight", (mla.kv_rank,), layer, "norm")
    width = config.heads * (mla.nope_head_dim + mla.v_head_dim)
    yield from _linear(f"{prefix}.kv_b", (width, mla.kv_rank), False, layer, "attention")
    out = (config.hidden, config.heads * mla.v_head_dim)
    yield from _linear(f"{prefix}.o", out, config.out_bias, layer, "attention")


def _ffn(prefix: str, config: ModelConfig, layer: int) -> Iterator[ParameterInfo]:
    for name in ("gate", "up") if config.gated else ("up",):
        shape = (config.ffn_hidden, config.hidden)
        yield from _linear(f"{prefix}.ffn.{name}", shape, config.ffn_bias, layer, "ffn")
    yield from _linear(f"{prefix}.ffn.down", (config.hidden, config.ffn_hidden), config.ffn_bias, layer, "ffn")


def _experts(prefix: str, config: ModelConfig, layer: int) -> Iterator[ParameterInfo]:
    moe = config.moe
    if moe is None:
        return
    yield _info(f"{prefix}.moe.router.weight", (moe.experts, config.hidden), layer, "router")
    if moe.bias_rate is not None:
        yield _info(f"{prefix}.moe.router.bias", (moe.experts,), layer, "router")
    if moe.bias:
        yield _info(f"{prefix}.moe.router.{LOGIT_BIAS}", (moe.experts,), layer, "router")
    if moe.residual:
        yield from _linear(f"{prefix}.moe.coefficients", (2, config.hidden), True, layer, "router")
    names = ("gate", "up", "down") if config.gated else ("up", "down")
    for name in names:
        rows, columns = (config.hidden, moe.ffn_hidden) if name == "down" else (moe.ffn_hidden, config.hidden)
        yield from _linear(f"{prefix}.moe.experts.{name}", (moe.experts * rows, columns), moe.bias, layer, "expert")
    if moe.shared_experts:
        width = moe.shared_experts * moe.ffn_hidden
        for name in names:
            shape = (config.hidden, width) if name == "down" else (width, config.hidden)
            yield _info(f"{prefix}.moe.shared.{name}.weight", shape, layer, "ffn")
