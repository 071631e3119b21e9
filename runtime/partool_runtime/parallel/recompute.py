"""Recomputation of activations in the backward pass (Chen et al., arXiv 1604.06174), per block."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from partool.spec.parallel import Recompute
from partool_kernels.fp8_linear import FP8_LINEARS
from partool_kernels.grouped_gemm.op import GROUPED
from partool_kernels.quantised.op import QUANTISED
from partool_runtime.hf.attention import taken
from partool_runtime.hf.numerics import stay_wide
from partool_runtime.hf.patches import Patch, patch_forward
from partool_runtime.model.around import Around
from partool_runtime.model.decoder import Block
from partool_runtime.model.operator import ATTEND
from partool_runtime.model.routing import CHOOSE
from partool_runtime.parallel import second_pass
from partool_runtime.parallel.expert.load import COUNTING
from partool_runtime.torch_internals.collectives import exchanging_operators, summing_operators
from partool_runtime.torch_internals.tensors import TorchDispatchMode

_aten = torch.ops.aten
KeptResults = defaultdict[Any, deque[Any]]
"""Results of a layer's first pass by operator, in the order of the calls."""
ROUTING = frozenset({CHOOSE, *COUNTING})
"""Operators whose results every policy keeps: a second pass uses the first pass's experts, and counts no load."""
ATTENTION = frozenset(
    {
        *ROUTING,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        ATTEND,
        *exchanging_operators(),
    }
)
"""Operators whose results ``keep_attention`` keeps: attention, and exchanges of ranks that share a sequence.
The cost of attention grows with the square of the sequence length, and exchanges depend on the slowest link; the cost
of matrix products grows only linearly with the length."""
SAVED = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        FP8_LINEARS,
        GROUPED,
        QUANTISED,
        *summing_operators(),
        *ATTENTION,
    }
)
"""Operators whose results ``selective`` keeps: matrix products, attention, and exchanges; all other operators are cheap
to recompute, even when fused into one kernel. A collective that sums a product in place takes no extra memory."""


def recompute(
    blocks: Iterable[nn.Module], policies: Iterable[Recompute], *, draws: bool = False, tiled: bool = False
) -> None:
    """Apply to every block, in place, the policy at the block's index in ``policies``.

    ``none`` keeps all tensors, ``attention`` keeps all except tensors inside the core of attention, ``selective`` keeps
    results of :data:`SAVED`, ``keep_attention`` keeps results of :data:`ATTENTION` (as does AutoSP, arXiv
    2604.27089, for long sequences), ``full`` keeps only the block's input. Layers of transformers have no separate core
    of attention, unless partool has replaced their attention: without a separate core, ``attention`` keeps nothing
    inside of the attention modules. ``draws`` means that layers use random numbers, so the generator's state is kept,
    too. A layer that draws is recomputed to its end, since within it tensor ranks switch to separate random numbers and
    back. ``tiled`` means that feed-forward networks process tiles, whose recomputation is built in.
    """
    for block, policy in zip(blocks, policies, strict=True):
        if policy == "attention":
            _attention(block, draws)
        elif policy != "none":
            contexts = _CONTEXTS[policy]
            if isinstance(block, Block) and block.moe is not None:
                contexts = partial(_experts_kept, _OF_EXPERTS[policy])
            around = _recomputed(contexts, draws=draws, tiled=tiled)
            if isinstance(block, Block):
                block.around = around
            else:
                patch_forward(block, Patch.SECOND_PASS, partial(around, block.forward))


def _attention(block: nn.Module, draws: bool) -> None:
    around = _recomputed(None, draws=draws)
    for attention in [block.attention] if isinstance(block, Block) else taken(block):
        attention.core = partial(around, attention.core)
    if isinstance(block, Block):
        return
    if taken(block):
        return
    for module in [module for module in block.modules() if "Attention" in type(module).__name__]:
        stay_wide(module)
        patch_forward(module, Patch.SECOND_PASS, partial(around, module.forward))


def _recomputed(contexts: Callable[[], Any] | None, *, draws: bool, tiled: bool = False) -> Around:
    """Return what makes the backward pass recompute a computation, except for results that ``contexts`` keep."""
    checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=draws, early_stop=not draws)
    if tiled:
        return partial(checkpointed, context_fn=partial(_tiled, contexts))
    return checkpointed if contexts is None else partial(checkpointed, context_fn=contexts)


def _products_kept() -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, SAVED))  # type: ignore[no-untyped-call]


def _attention_kept() -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, ATTENTION))  # type: ignore[no-untyped-call]


def _experts_kept(kept: frozenset[Any]) -> Any:
    """Return contexts for a layer of experts: compilers follow torch's only, whose hooks of sharding are outside."""
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(partial(_policy, kept))  # type: ignore[no-untyped-call]
    return kept_contexts(kept)


_CONTEXTS: dict[Recompute, Callable[[], Any] | None] = {
    "full": None,
    "selective": _products_kept,
    "keep_attention": _attention_kept,
}


_OF_EXPERTS: dict[Recompute, frozenset[Any]] = {"full": ROUTING, "selective": SAVED, "keep_attention": ATTENTION}


def _policy(saved: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Kept results of all tiles together would take as much memory as results for the whole sequence.
    save = operator in saved and not second_pass.is_tile()
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _tiled(contexts: Callable[[], Any] | None) -> tuple[Any, Any]:
    forward, backward = (nullcontext(), nullcontext()) if contexts is None else contexts()
    return forward, _RecomputingLayer(backward)


class _RecomputingLayer:
    """Wraps another context, and marks that a layer is being recomputed."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._stack = inner, ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._inner)
        self._stack.enter_context(second_pass.recomputing_layer())

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)


def kept_contexts(kept: Collection[Any]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return contexts of the first and of the second pass of a layer that is sharded inside; ``kept`` are operators.

    torch's own contexts for selective recomputation count the calls of every operator, and fail where FSDP2 gathers the
    parameters of a module within the layer in one pass only. These contexts count the kept operators only.
    """
    results: KeptResults = defaultdict(deque)
    return _KeepResults(kept, results), _ReuseResults(kept, results)


def _detached(result: Any) -> Any:
    """Return an operator's result, a tensor or several, without its autograd graph; some results are not tensors."""
    if isinstance(result, tuple | list):
        return tuple(map(_detached, result))
    return result.detach() if isinstance(result, torch.Tensor) else result


class _KeepResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps results, but not those of tiles, which together would be as large as results of the whole sequence."""

    def __init__(self, kept: Collection[Any], results: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._results = kept, results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and keep its results if they are wanted."""
        out = func(*args, **(kwargs or {}))
        if func in self._kept and not second_pass.is_tile():
            self._results[func].append(_detached(out))
        return out


class _ReuseResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: Collection[Any], results: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._results = kept, results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return an operator's kept results, or run it."""
        if func in self._kept and not second_pass.is_tile():
            return self._results[func].popleft()
        return func(*args, **(kwargs or {}))
