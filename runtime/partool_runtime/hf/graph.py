"""Captures the base model of a transformers model as a graph, with attention as nodes that partool knows."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from torch import nn

from partool_runtime.graph.attention import attend_with
from partool_runtime.graph.capture import Captured, CaptureError, capture
from partool_runtime.hf.attention import unknown_options

_NAME = "partool_graph"
"""Name of the attention, for models that lack torch's function: their scores are capped, or they have sinks."""


def capture_base(
    base: nn.Module, *, dtype: torch.dtype, device: torch.device, training: bool, documents: bool = False
) -> Captured:
    """Return the graph of a base model; with ``documents`` it takes positions. Raises :class:`CaptureError`."""
    inputs = {"tokens": "input_ids"}
    if documents:
        if "position_ids" not in inspect.signature(type(base).forward).parameters:
            raise CaptureError("it takes no positions, which start anew in each document")
        inputs["positions"] = "position_ids"
    fixed = {"use_cache": False, "return_dict": True}
    return capture(
        base, dtype=dtype, device=device, inputs=inputs, fixed=fixed, training=training, before=_with_nodes
    )


def _with_nodes(base: nn.Module) -> None:
    """Make a copy of a model call an attention function that partool knows, if its own is written out in products."""
    modeling: Any = import_module("transformers.modeling_utils")
    masking: Any = import_module("transformers.masking_utils")
    own = getattr(getattr(base, "config", None), "_attn_implementation", None)
    if own != "eager" or not getattr(base, "_supports_attention_backend", False):
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
    out = attend_with(
        query, key, value, attention_mask, dropout, attention_mask is None, scaling, softcap, s_aux
    )
    return out.transpose(1, 2).contiguous(), None
