"""Recomputation of activations in the backward pass (Chen et al., arXiv 1604.06174), per block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from partool.spec.parallel import Recompute
from partool_runtime.hf.numerics import stay_wide
from partool_runtime.model.decoder import Block
from partool_runtime.torch_internals import summing_operators

_aten = torch.ops.aten
SAVED = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        *summing_operators(),
    }
)
"""Operators whose results ``selective`` keeps: matrix products, attention, and what tensor-parallel ranks exchange; all
else is cheap to do again. A sum in place of a product takes no memory beside it."""


def recompute(blocks: Iterable[nn.Module], policies: Iterable[Recompute], *, draws: bool = False) -> None:
    """Give every block its policy, in place.

    ``none`` keeps all, ``attention`` all but what is inside the core of attention, ``selective`` keeps :data:`SAVED`,
    ``full`` only the block's input. Layers of transformers have no core of attention that could be told apart: of them
    ``attention`` keeps nothing that is inside of an attention module. ``draws``: layers draw random numbers, whose
    state is kept, too; such a layer is computed again to its end, since tensor ranks begin and end to draw numbers of
    their own in the middle of it.
    """
    for block, policy in zip(blocks, policies, strict=True):
        if policy == "attention":
            _attention(block, draws)
        elif policy != "none":
            _put(block, _WRAPPERS[policy](block.forward, draws))


def _attention(block: nn.Module, draws: bool) -> None:
    if isinstance(block, Block):
        block.attention.core = _full(block.attention.core, draws)
        return
    for module in [module for module in block.modules() if "Attention" in type(module).__name__]:
        stay_wide(module)
        _put(module, _full(module.forward, draws))


def _put(module: nn.Module, forward: Callable[..., Any]) -> None:
    setattr(module, "forward", forward)  # noqa: B010 - mypy forbids assigning a method


def _full(forward: Callable[..., Any], draws: bool) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=draws, early_stop=not draws)


def _selective(forward: Callable[..., Any], draws: bool) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return partial(_full(forward, draws), context_fn=contexts)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


_WRAPPERS = {"full": _full, "selective": _selective}
