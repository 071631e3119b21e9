"""Attention nodes of a captured graph, and what replaces them where ranks share sequences."""

from __future__ import annotations

import inspect
import operator
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.nn import functional as F

from partool_runtime.graph.capture import CaptureError, where
from partool_runtime.graph.nodes import value_of
from partool_runtime.torch_internals.tracing import one_node


@one_node
def attend_with(  # noqa: PLR0917 - as torch's function
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention with limited scores (Gemma 2, arXiv 2408.00118, section 2) or with sinks (gpt-oss), as a node.

    Arguments are those of torch's function; further, scores become ``softcap · tanh(scores / softcap)``, and ``sinks``
    ``[N]`` is one more score of each head that takes a share of the weights but has no value. All scores of a layer,
    ``[B, N, L, L]``, exist at once.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1, dtype=wide)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=wide)
    return F.dropout(weights.to(query.dtype), dropout_p) @ value


ATTENTION = (F.scaled_dot_product_attention, attend_with)
"""Functions that are attention in a graph."""
_SIGNATURES: dict[Any, tuple[str, ...]] = {
    F.scaled_dot_product_attention: (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ),
    attend_with: tuple(inspect.signature(attend_with).parameters),
}  # fmt: skip


def _inserts(node: Any) -> bool:
    """Return True if a node inserts a dimension, and changes nothing else."""
    if node.target in ("unsqueeze", torch.unsqueeze):
        return True
    index = node.args[1] if node.target is operator.getitem and len(node.args) > 1 else ()
    return isinstance(index, tuple) and index != () and all(one is None or one == slice(None) for one in index)


class AttentionNode(NamedTuple):
    """The arguments of an attention node."""

    heads: tuple[fx.Node, fx.Node, fx.Node]
    """Queries, keys and values, ``[B, heads, S, D]``; keys and values as they were before a model repeated them."""
    mask: fx.Node | None
    sinks: fx.Node | None
    causal: bool
    dropout: float
    scale: float | None
    softcap: float | None


def attention_node(node: fx.Node) -> AttentionNode | None:
    """Return the arguments of an attention node; None for other nodes. Raises :class:`CaptureError`."""
    if node.op != "call_function" or node.target not in ATTENTION:
        return None
    given: dict[str, Any] = dict(zip(_SIGNATURES[node.target], node.args, strict=False)) | dict(node.kwargs)
    query, key, value = (cast(fx.Node, given[name]) for name in ("query", "key", "value"))
    if value_of(query).dim() != 4:
        raise CaptureError(f"its attention has queries of {query.meta['example_value'].dim()} dimensions{where(node)}")
    heads = value_of(query).shape[1]
    key, value = _few(key, value, heads)
    numbers = ("scale", "softcap", "dropout_p", "is_causal")
    if any(isinstance(given.get(name), fx.Node) for name in numbers):
        raise CaptureError(f"its attention has a number that follows the tokens{where(node)}")
    keys = value_of(key).shape[1]
    even = keys == value_of(value).shape[1] and all(isinstance(count, int) for count in (heads, keys))
    if not even or heads % keys:
        raise CaptureError(f"its attention has {heads} heads of queries and {keys} of keys{where(node)}")
    return AttentionNode(
        (query, key, value),
        given.get("attn_mask"),
        given.get("sinks"),
        bool(given.get("is_causal", False)),
        float(given.get("dropout_p", 0.0)),
        given.get("scale"),
        given.get("softcap"),
    )


def _few(key: fx.Node, value: fx.Node, heads: int) -> tuple[fx.Node, fx.Node]:
    """Return keys and values without the copies that a model makes for each query head, so that fewer are sent."""
    fewer = _unrepeated(key), _unrepeated(value)
    counts = {value_of(node).shape[1] for node in fewer}
    return fewer if len(counts) == 1 and heads % counts.pop() == 0 else (key, value)


def _unrepeated(node: fx.Node) -> fx.Node:
    """Return the node of the heads ``[B, K, S, D]`` that a node repeats to ``[B, K · n, S, D]``, each n times in turn.

    transformers repeats heads by an index with None, ``expand`` and ``reshape``; other models by
    ``repeat_interleave``.
    """
    args: Any = node.args
    if node.target in ("repeat_interleave", torch.repeat_interleave):
        arguments = dict(zip(("input", "repeats", "dim"), args, strict=False)) | dict(node.kwargs)
        whole_heads = arguments.get("dim") in (1, -3) and isinstance(arguments.get("repeats"), int)
        return cast(fx.Node, args[0]) if whole_heads else node
    if node.target not in ("reshape", "view", "flatten", torch.reshape, torch.flatten):
        return node
    expanded: Any = args[0]
    if expanded.target not in ("expand", torch.Tensor.expand) or value_of(expanded).dim() != 5:
        return node
    narrow: Any = expanded.args[0]
    origin: Any = narrow.args[0] if narrow.args else None
    batch, keys, copies, length, width = value_of(expanded).shape
    inserted = tuple(value_of(narrow).shape) == (batch, keys, 1, length, width) and _inserts(narrow)
    merged = tuple(value_of(node).shape) == (batch, keys * copies, length, width)
    if inserted and merged and tuple(value_of(origin).shape) == (batch, keys, length, width):
        return cast(fx.Node, origin)
    return node
