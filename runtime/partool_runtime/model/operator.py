"""One differentiable operator for every attention that needs more than one kernel call.

Compiled layers keep the operator as one node, selective recomputation can keep its results, and wrappers do not see
inside it. Operators cannot take objects, so this operator takes the name of an :class:`Exchange`, which may
communicate.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from partool.layout.sequence import Spans
from partool_runtime.model.blocks import BlockPair, Returned, Seen, like_tokens
from partool_runtime.model.kernels import wide
from partool_runtime.model.visibility import AttentionLayout

_NUMBERS = count()
_UNLIMITED = 0
"""Value of the window argument that means no window."""


class Exchange(Protocol):
    """Attention with a custom backward pass; ranks may communicate in both passes, and each rank keeps its queries."""

    def forward(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result ``[B, N, S, D]`` and its logsumexp ``[B, N, S]``, which is in float32 or wider."""
        ...

    def backward(
        self,
        grad_BNSD: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v; ``saved`` are q, k, v, and both outputs of :meth:`forward`."""
        ...


class Whole:
    """An :class:`Exchange` without communication: all tokens of the sequence are on this rank."""

    def forward(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`."""
        seen = Seen(q_BNSD)
        seen.meet(k_BKSD, v_BKSD, _all(q_BNSD, layout, documents_BL))
        return seen.result()

    def backward(
        self,
        grad_BNSD: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`."""
        q_BNSD, k_BKSD, v_BKSD, out_BNSD, lse_BNS = saved
        back = Returned(q_BNSD, grad_BNSD, out_BNSD, lse_BNS)
        dk_BKSD, dv_BKSD = (like_tokens(x, wide(x.dtype)).zero_() for x in (k_BKSD, v_BKSD))
        back.meet((k_BKSD, v_BKSD), (dk_BKSD, dv_BKSD), _all(q_BNSD, layout, documents_BL))
        return back.dq_BNQD, dk_BKSD, dv_BKSD


def _all(q_BNSD: torch.Tensor, layout: AttentionLayout, documents_BL: torch.Tensor | None) -> BlockPair:
    spans: Spans = ((0, q_BNSD.shape[2]),)
    return BlockPair(spans, spans, layout, documents_BL)


WHOLE: Exchange = Whole()
_NAME_OF_WHOLE = "Whole"
_EXCHANGES: WeakValueDictionary[str, Exchange] = WeakValueDictionary({_NAME_OF_WHOLE: WHOLE})
"""Exchanges by name; an entry disappears when nothing else references its exchange."""


def register(exchange: Exchange) -> str:
    """Return a new name, by which :func:`attend_by` finds the exchange while other code refers to the exchange."""
    name = f"{type(exchange).__name__} {next(_NUMBERS)}"
    _EXCHANGES[name] = exchange
    return name


def attend_by(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: AttentionLayout,
    documents_BL: torch.Tensor | None,
    name: str = _NAME_OF_WHOLE,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention ``[B, N, S, D]`` that the named exchange computes from ``heads`` (queries, keys, values).

    The default ``name`` selects :class:`Whole`, for which keys and values cover the whole sequence. With sinks s, the
    result and its logsumexp l become exp(l − m) · result and m = log(exp l + exp s). Backward passes of exchanges need
    no more than these two: the probabilities of keys follow from m, and the value of a sink is zero.
    """
    out_BNSD: torch.Tensor
    numbers = layout.window or _UNLIMITED, layout.scale
    out_BNSD, _ = torch.ops.partool.attend_together(*heads, documents_BL, sinks_N, name, *numbers)
    return out_BNSD


@torch.library.custom_op(
    "partool::attend_together",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor? sinks, str name, int window, float? scale)"
        " -> (Tensor, Tensor)"
    ),
)
def _attend(
    q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and the logarithm of the sums of exponentials ``[B, N, S]`` in float32 or wider."""
    documents_BL, sinks_N, name, window, scale = others
    layout = AttentionLayout(window or None, scale=scale)
    out_BNSD, lse_BNS = _EXCHANGES[name].forward(q_BNSD, k_BKSD, v_BKSD, layout, documents_BL)
    if sinks_N is not None:
        both_BNS = torch.logaddexp(lse_BNS, sinks_N.to(lse_BNS.dtype)[:, None])
        out_BNSD = (out_BNSD * (lse_BNS - both_BNS).exp()[..., None]).to(q_BNSD.dtype)
        lse_BNS = both_BNS
    # The results need the memory layout that compiled code expects.
    return out_BNSD.transpose(1, 2).contiguous().transpose(1, 2), lse_BNS.contiguous()


@_attend.register_fake
def _(
    q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out_BNSD = like_tokens(q_BNSD, q_BNSD.dtype, width=v_BKSD.shape[3])
    return out_BNSD, q_BNSD.new_empty(q_BNSD.shape[:3], dtype=wide(q_BNSD.dtype))


@torch.library.custom_op(
    "partool::attend_together_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? documents, str name, int window,"
        " float? scale) -> (Tensor, Tensor, Tensor)"
    ),
)
def _backward(grad_BNSD: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    *saved, documents_BL, name, window, scale = arguments
    q_BNSD, k_BKSD, v_BKSD, out_BNSD, lse_BNS = saved
    layout = AttentionLayout(window or None, scale=scale)
    grads = _EXCHANGES[name].backward(grad_BNSD, (q_BNSD, k_BKSD, v_BKSD, out_BNSD, lse_BNS), layout, documents_BL)
    # Gradients are copied, since outputs of an operator must not alias each other.
    dq, dk, dv = (
        like_tokens(like, like.dtype).copy_(x) for x, like in zip(grads, (q_BNSD, k_BKSD, v_BKSD), strict=True)
    )
    return dq, dk, dv


@_backward.register_fake
def _(grad_BNSD: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (like_tokens(x, x.dtype) for x in arguments[:3])
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q_BNSD, k_BKSD, v_BKSD, documents_BL, sinks_N, name, window, scale = inputs
    ctx.save_for_backward(q_BNSD, k_BKSD, v_BKSD, *output, documents_BL, sinks_N)
    ctx.how = name, window, scale


def _gradients(ctx: Any, grad_BNSD: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    *saved, sinks_N = ctx.saved_tensors
    grads = torch.ops.partool.attend_together_backward(grad_BNSD, *saved, *ctx.how)
    of_sinks = None
    if sinks_N is not None and ctx.needs_input_grad[4]:
        out_BNSD, lse_BNS = saved[3], saved[4]
        # A sink's probability times (0 − grad · result), as its value is zero.
        products_BNS = (grad_BNSD * out_BNSD).sum(dim=-1, dtype=lse_BNS.dtype)
        shares_BNS = (sinks_N.to(lse_BNS.dtype)[:, None] - lse_BNS).exp()
        of_sinks = -(shares_BNS * products_BNS).sum(dim=(0, 2)).to(sinks_N.dtype)
    return *grads, None, of_sinks, None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)

ATTEND = torch.ops.partool.attend_together.default
"""The operator, as dispatch modes see it."""
