"""Replaces the attention core in a transformers model; otherwise the model's layers run their own code.

transformers looks up the attention core, and the function that makes masks, by one name in the configuration. Both are
registered once, under one name, without state. A layer's core is stored in the layer's attention module, and the tokens
of a pass are passed in place of the mask. Thus two models, or several micro-batches of a pipeline, do not mix their
cores and tokens, and recomputed layers get the same tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.patches import Patch, patch_forward
from partool_runtime.model.attention import AttentionLayout, Tokens, attend, visible
from partool_runtime.model.decoder import positions

NAME = "partool"
"""Name of the implementation, in ``config._attn_implementation``."""
KNOWN = frozenset({"sliding_window", "position_ids", "cache_position", "use_cache", "is_causal", "output_attentions"})
"""Arguments of attention that can be ignored, because the mask covers them or only text generation needs them."""
MOVING = frozenset({"dynamic", "longrope"})
"""Kinds of rotary embeddings whose frequencies depend on the last position of a pass."""
_PLACE = "_partool_attention"
_TAKEN = "_partool_taken"
_now: ContextVar[Tokens | None] = ContextVar("tokens of the pass that runs", default=None)
_watch: ContextVar[Callable[[Mapping[str, Any]], None] | None] = ContextVar("who is told of masks", default=None)


@dataclass(frozen=True, slots=True)
class MaskStandIn:
    """Stand-in for a mask: an opaque object, so that wrappers pass it on unchanged."""

    window: int | None
    """Number of tokens that a token attends to, including itself; None means all earlier tokens."""
    tokens: Tokens | None


class HfAttention:
    """The attention of one layer, with the fields that sequence parallelism replaces in partool's own layers."""

    def __init__(self, layout: AttentionLayout) -> None:
        self.layout = layout
        self.core: Callable[..., torch.Tensor] = self.attend_sequences
        """See :class:`partool_runtime.parallel.sequence.types.Attend`; recomputation wraps it."""
        self.exchange: Callable[..., torch.Tensor] | None = None
        """Function that exchanges tokens for heads; its arguments are queries, keys, values and the core."""
        self._dropout = 0.0

    def __call__(
        self,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        seen: Any,
        scaling: float | None,
        dropout: float,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Return the attention ``[B, S, N, D]`` of queries, keys and values ``[B, N or K, S, D]``; raises PT654."""
        _check(self.layout, seen, options)
        q_BNSD, k_BKSD, v_BKSD = heads
        if q_BNSD.shape[1] == 0:
            # A tensor rank without heads exchanges nothing, but its projections take part in the backward pass.
            return v_BKSD[:, :0].transpose(1, 2) + (q_BNSD.sum() + k_BKSD.sum())
        usual_scaling = q_BNSD.shape[3] ** -0.5
        if scaling is not None and scaling != usual_scaling:
            q_BNSD = q_BNSD * (scaling / usual_scaling)
        self._dropout = dropout
        core: Callable[..., torch.Tensor] = partial(self.core, layout=self.layout, tokens=seen.tokens)
        if self.exchange is not None:
            core = partial(self.exchange, core=core)
        out_BNSD: torch.Tensor = core(q_BNSD, k_BKSD, v_BKSD)
        return out_BNSD.transpose(1, 2).contiguous()

    def attend_sequences(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        tokens: Tokens | None,
    ) -> torch.Tensor:
        """Attend over whole sequences, with all or some heads; apply the layer's dropout to the weights."""
        return attend_whole(q_BNSD, k_BKSD, v_BKSD, layout, tokens, self._dropout)


def attend_whole(  # noqa: PLR0917 - like attend, and the dropout
    q_BNSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    layout: AttentionLayout,
    tokens: Tokens | None,
    dropout: float,
) -> torch.Tensor:
    """Attend over whole sequences; ``dropout`` is the share of weights that are dropped."""
    if dropout == 0.0:
        return attend(q_BNSD, k_BKSD, v_BKSD, layout, tokens)
    places = torch.arange(q_BNSD.shape[2], device=q_BNSD.device)
    documents = None if tokens is None or tokens.documents_BL is None else (tokens.documents_BL,) * 2
    mask = None
    if documents is not None or layout.window is not None:
        mask = visible(places, places, layout, documents=documents)
    return F.scaled_dot_product_attention(
        q_BNSD, k_BKSD, v_BKSD, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=layout.scale,
        enable_gqa=True,
    )  # fmt: skip


class HfBlock(NamedTuple):
    """A layer of transformers, with the fields that sequence parallelism uses."""

    attention: HfAttention


@contextmanager
def holding(tokens: Tokens | None) -> Iterator[None]:
    """Make masks that a base model creates within the context carry ``tokens``, the tokens of the pass."""
    token = _now.set(tokens)
    try:
        yield
    finally:
        _now.reset(token)


@contextmanager
def watching(observer: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Call ``observer`` with the arguments of every mask that is created within the context."""
    token = _watch.set(observer)
    try:
        yield
    finally:
        _watch.reset(token)


def take(
    bases: Iterable[nn.Module], layers: Mapping[int, nn.Module], windows: Mapping[int, int | None]
) -> dict[int, HfBlock]:
    """Replace the attention core of ``layers`` in place; ``windows`` maps a layer's number to the layer's window.

    Tensor parallelism may already have given each attention module a separate configuration.
    """
    register()
    blocks = {}
    for number, layer in layers.items():
        blocks[number] = HfBlock(HfAttention(AttentionLayout(windows[number])))
        keep_attention(layer, [blocks[number].attention])
        for module in layer.modules():
            module.__dict__[_PLACE] = blocks[number].attention
            _choose(getattr(module, "config", None))
    for base in bases:
        _choose(getattr(base, "config", None))
        for module in base.modules():
            kinds = getattr(module, "rope_type", None)
            if MOVING & set(kinds.values() if isinstance(kinds, dict) else [kinds]):
                patch_forward(module, Patch.ROTARY, partial(_of_whole_sequences, module.forward))
    return blocks


def taken(layer: nn.Module) -> list[Any]:
    """Return what replaced a layer's attention, with a field ``core``; empty if the layer has its own attention."""
    return list(layer.__dict__.get(_TAKEN, ()))


def keep_attention(layer: nn.Module, attention: Sequence[Any]) -> None:
    """Record what replaced a layer's attention, for :func:`taken`."""
    layer.__dict__[_TAKEN] = list(attention)


def place(module: nn.Module, attention: Any) -> None:
    """Replace a layer's attention by a callable with the interface of :class:`HfAttention`."""
    for inner in module.modules():
        inner.__dict__[_PLACE] = attention
        _choose(getattr(inner, "config", None))


def register() -> None:
    """Register the attention and the mask with transformers, under :data:`NAME`."""
    modeling: Any = import_module("transformers.modeling_utils")
    masking: Any = import_module("transformers.masking_utils")
    modeling.ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def _choose(config: Any) -> None:
    if config is not None and hasattr(config, "_attn_implementation"):
        config._attn_implementation = NAME


def _of_whole_sequences(
    forward: Callable[..., Any], x: torch.Tensor, position_ids: torch.Tensor, *others: Any, **options: Any
) -> Any:
    """Return the rotary tables for a rank's tokens, with the frequencies that whole sequences have."""
    tokens = _now.get()
    if tokens is None or tokens.index_S is None:
        return forward(x, position_ids, *others, **options)
    all_tokens = Tokens(tokens.length, None, tokens.documents_BL)
    at = positions(x, all_tokens)
    tables = forward(x, at if at.dim() == 2 else at[None], *others, **options)
    return tuple(table[:, tokens.index_S] for table in tables)


def _mask(**described: Any) -> MaskStandIn:
    """Return a stand-in for a mask. It carries the window, which transformers passes only to the mask function."""
    observer = _watch.get()
    if observer is not None:
        observer(described)
    return MaskStandIn(described.get("local_size"), _now.get())


def _attention(  # noqa: PLR0917 - as transformers calls it
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of a layer's heads; called by transformers as the attention core."""
    out_BSND = module.__dict__[_PLACE]((query, key, value), attention_mask, scaling, dropout, options)
    return out_BSND, None


def _check(layout: AttentionLayout, seen: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError PT654 if a layer's attention differs from the planned attention."""
    asked = seen.window if isinstance(seen, MaskStandIn) else None
    window = options.get("sliding_window")
    unknown = unknown_options(options)
    if not isinstance(seen, MaskStandIn):
        what = f"gets a {type(seen).__name__} as its mask"
    elif unknown:
        what = f"asks for {', '.join(unknown)}"
    elif asked != layout.window or window not in (None, layout.window):
        what = f"has a window of {window or asked}, and of {layout.window} by the plan"
    else:
        return
    fix = "Plan it again with the transformers that is installed here."
    raise ConfigurationError("PT654", f"a layer's attention {what}", fix)


def unknown_options(options: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that change the result of attention in an unsupported way."""
    return sorted(
        name for name, value in options.items() if name not in KNOWN and value is not None and value is not False
    )
