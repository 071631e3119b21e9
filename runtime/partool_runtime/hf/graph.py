"""Captures the base model of a transformers model as a graph, with attention as nodes that partool knows.

``python -P -m partool_runtime.hf.graph DIR HASH TOKENS`` prints the attention of a folder's model for the planner, as
JSON.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import fx, nn

from partool_runtime.graph.attention import AttentionNode, attend_with, attention_node
from partool_runtime.graph.capture import Captured, CaptureError, capture, inside, line_of
from partool_runtime.graph.cut import cut
from partool_runtime.graph.masks import rule_of
from partool_runtime.graph.nodes import value_of
from partool_runtime.graph.share import Sharing, share
from partool_runtime.graph.tokenwise import check_tokenwise
from partool_runtime.hf.attention import unknown_options
from partool_runtime.hf.building import base_name, blocks_name, build_causal, draws_random, say_as_json

_NAME = "partool_graph"
"""Name of the attention, for models that lack torch's function: their scores are capped, or they have sinks."""


def capture_base(
    base: nn.Module, *, dtype: torch.dtype, length: int, training: bool, documents: bool = False, batch: int = 2
) -> Captured:
    """Return the graph of a base model for ``length`` tokens; with ``documents`` it takes positions.

    Raises :class:`CaptureError`.
    """
    inputs = {"tokens": "input_ids"}
    if documents:
        if "position_ids" not in inspect.signature(type(base).forward).parameters:
            raise CaptureError("it takes no positions, which start anew in each document")
        inputs["positions"] = "position_ids"
    fixed = {"use_cache": False, "return_dict": True}
    experts = {name for name, module in base.named_modules() if _is_experts(module)}
    return capture(
        base,
        dtype=dtype,
        length=length,
        inputs=inputs,
        fixed=fixed,
        training=training,
        batch=batch,
        opaque=experts,
        before=_with_nodes,
    )


def _is_experts(module: nn.Module) -> bool:
    """Return True for the experts of transformers, whose class holds all matrices of a kind as ``[E, out, in]``."""
    stacked = any(parameter is not None and parameter.dim() == 3 for parameter in module._parameters.values())
    return stacked and type(module).__name__.endswith("Experts")


def _with_nodes(base: nn.Module) -> None:
    """Make a copy of a model call an attention function that partool knows, if its own is written out in products."""
    modeling: Any = import_module("transformers.modeling_utils")
    masking: Any = import_module("transformers.masking_utils")
    implementation = getattr(getattr(base, "config", None), "_attn_implementation", None)
    if implementation != "eager" or not getattr(base, "_supports_attention_backend", False):
        return
    modeling.ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    for module in base.modules():
        config: Any = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = _NAME


def _attention(  # noqa: PLR0917 - as transformers calls it
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of a layer's heads, ``[B, S, N, D]``; called by transformers."""
    unknown = unknown_options(options)
    if unknown:
        raise CaptureError(f"its attention uses {', '.join(unknown)}")
    out = attend_with(query, key, value, attention_mask, dropout, attention_mask is None, scaling, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


class AttentionFields(TypedDict):
    """An attention node of a graph, with the fields of ``FoundAttention`` (:mod:`partool.planner.described`)."""

    heads: int
    key_heads: int
    head_dim: int
    sees: str
    module: str
    line: str


def describe(path: Path | str, code: str, length: int) -> dict[str, object]:
    """Return ``problem``, why ranks cannot share the model's graph (empty if they can), and its ``attention``.

    Both are of sequences of ``length`` tokens. Raises ConfigurationError PT643, PT590, PT591.
    """
    causal = build_causal(Path(path), code)
    base = causal.get_submodule(base_name(causal))
    layers = causal.config.num_hidden_layers  # type: ignore[union-attr]
    units = [f"{blocks_name(base, cast(int, layers))}.{number}" for number in range(cast(int, layers))]
    try:
        of_length = partial(capture_base, base, dtype=torch.float32, length=length)
        problem, attention = attention_in(of_length(training=True), length, base, units)
        if not problem and draws_random(causal):
            problem, _ = attention_in(of_length(training=False), length, base, units)
    except CaptureError as error:
        problem, attention = str(error), []
    return {"problem": problem, "attention": attention}


def attention_in(
    captured: Captured, length: int, root: nn.Module, units: Sequence[str]
) -> tuple[str, list[AttentionFields]]:
    """Return why ranks cannot share a graph (empty if they can), and the fields of each attention node in it.

    Sequences have ``length`` tokens; ``units`` are the names of the layers.
    """
    layers: list[AttentionFields] = []
    try:
        nodes = [(node, seen) for node in captured.graph.nodes if (seen := attention_node(node)) is not None]
        buffers = dict(root.named_buffers())
        layers = [_fields(node, seen, captured, buffers, length) for node, seen in nodes]
        check_tokenwise(captured)
        batch = captured.batch if isinstance(captured.batch, int) else 2
        sharing = Sharing(
            batch, length, (0, (length + 1) // 2), lambda node: (_unused, True), root.get_submodule, torch.device("cpu")
        )
        cut(share(captured, sharing).graph, root, units)
    except CaptureError as error:
        return str(error), layers
    return "", layers


def _fields(
    node: fx.Node, seen: AttentionNode, captured: Captured, buffers: dict[str, torch.Tensor], length: int
) -> AttentionFields:
    query, key, _ = (value_of(each).shape for each in seen.heads)
    rule: int | str | None = rule_of(seen.mask, captured, buffers, length) if seen.mask is not None else None
    sees = "all earlier tokens" if rule is None else f"the last {rule} tokens" if isinstance(rule, int) else "a mask"
    if seen.mask is None and not seen.causal:
        sees = "all tokens"
    return {
        "heads": query[1], "key_heads": key[1], "head_dim": int(query[3]), "sees": sees,
        "module": (inside(node) or [""])[-1], "line": line_of(node),
    }  # fmt: skip


def _unused(*arguments: Any) -> torch.Tensor:
    raise AssertionError("the graph is described, not run")


if __name__ == "__main__":
    sys.exit(say_as_json(lambda path, code, length: describe(path, code, int(length)), sys.argv[1:]))
