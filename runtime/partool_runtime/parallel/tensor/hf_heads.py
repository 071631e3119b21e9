"""Numbers of heads of a tensor rank, set in attention modules of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from partool_runtime.hf.patches import Patch, patch_forward
from partool_runtime.hf.sizes import kv_heads

_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_KEYS = ("k_proj", "key", "k")


class Widths(NamedTuple):
    """Widths of the inputs of attention's last matrix, or of the outputs of another attention matrix."""

    here: int
    """Width that this rank holds."""
    full: int


def is_attention(module: nn.Module) -> bool:
    """Return True if a module computes attention, judged by the attributes that models of transformers use."""
    named = any(hasattr(module, name) for name in ("num_key_value_groups", "head_dim", "head_size", *_HEADS))
    return named and bool(getattr(getattr(module, "config", None), "num_attention_heads", 0))


def tell_heads(module: nn.Module, out: Widths, inputs: Mapping[str, Widths]) -> None:
    """Set an attention module's numbers of heads; ``inputs`` has, by name, the widths of matrices cut by outputs."""
    config: Any = module.config
    queries, keys = _local_heads(config, out, inputs)
    local_config = copy.copy(config)
    local_config.num_attention_heads = queries
    if getattr(config, "num_key_value_heads", None) is not None:
        local_config.num_key_value_heads = keys
    module.config = local_config
    for names, count in ((_HEADS, queries), (_KEY_HEADS, keys)):
        for name in names:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, count)
    if isinstance(getattr(module, "num_key_value_groups", None), int):
        cast(Any, module).num_key_value_groups = max(1, queries // max(1, keys))
    if isinstance(split := getattr(module, "split_size", None), int):  # GPT-2's
        cast(Any, module).split_size = split * queries // config.num_attention_heads
    if queries == 0:
        patch_forward(module, Patch.TENSOR, partial(_without_heads, module.forward))


def _local_heads(config: Any, out: Widths, inputs: Mapping[str, Widths]) -> tuple[int, int]:
    """Return the number of query heads and the number of key and value heads that this rank has."""
    heads = config.num_attention_heads
    keys = kv_heads(config)
    queries = out.here * heads // out.full
    for name in _KEYS:
        if name in inputs:
            return queries, inputs[name].here * keys // inputs[name].full
    if keys == heads or not inputs:
        return queries, queries
    fused = next(iter(inputs.values()))
    each = fused.full // (heads + 2 * keys)
    return queries, (fused.here // each - queries) // 2


class _Empty(TorchFunctionMode):
    """Makes views of a tensor without elements treat the size -1 as 0; torch rejects -1 there as ambiguous."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, with 0 in place of -1 in the sizes of a view of an empty tensor."""
        if func in (torch.Tensor.view, torch.Tensor.reshape) and args[0].numel() == 0 and not kwargs:
            sizes = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
            if not isinstance(sizes, torch.dtype) and -1 in sizes and prod(size for size in sizes if size != -1):
                args = (args[0], tuple(0 if size == -1 else size for size in sizes))
        return func(*args, **(kwargs or {}))


def _without_heads(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run attention on a rank without heads; the rank still takes part in every exchange."""
    with _Empty():
        return forward(*args, **kwargs)
