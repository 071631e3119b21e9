"""One operator, with a backward pass, of every method whose ranks keep their queries and exchange keys and values.

Compiled layers keep it as one node, selective recomputation can keep its results, and no wrapper sees what it sends. An
operator has no place for objects: it is given the name of one (:class:`ExchangeAttend`).
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from partool_runtime.model.attention import AttentionLayout, Tokens
from partool_runtime.model.blocks import like_tokens
from partool_runtime.model.kernels import wide
from partool_runtime.parallel.sequence.types import Exchange

_NAMES = count()
_EXCHANGES: WeakValueDictionary[str, Exchange] = WeakValueDictionary()
"""By name, as long as a layer uses them."""
_UNLIMITED = 0
"""In the place of a window that there is not."""


class ExchangeAttend:
    """Stands in the place of :func:`partool_runtime.model.attend`; see :class:`Attend`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.name = f"{type(exchange).__name__} {next(_NAMES)}"
        _EXCHANGES[self.name] = exchange

    def __call__(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        tokens: Tokens | None,
    ) -> torch.Tensor:
        """Return the attention of this rank's queries, ``[B, N, S, D]``."""
        documents_BL = None if tokens is None else tokens.documents_BL
        out_BNSD: torch.Tensor
        out_BNSD, _ = torch.ops.partool.attend_together(
            q_BNSD, k_BKSD, v_BKSD, documents_BL, self.name, layout.window or _UNLIMITED
        )
        return out_BNSD


@torch.library.custom_op(
    "partool::attend_together",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? documents, str name, int window) -> (Tensor, Tensor)",
)
def _attend(
    q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and the wide logarithm of the sums of exponentials ``[B, N, S]``."""
    documents_BL, name, window = others
    layout = AttentionLayout(window or None)
    out_BNSD, lse_BNS = _EXCHANGES[name].forward(q_BNSD, k_BKSD, v_BKSD, layout, documents_BL)
    return _placed(out_BNSD, q_BNSD), lse_BNS.contiguous()


@_attend.register_fake
def _(q_BNSD: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return like_tokens(q_BNSD, q_BNSD.dtype), q_BNSD.new_empty(q_BNSD.shape[:3], dtype=wide(q_BNSD.dtype))


@torch.library.custom_op(
    "partool::attend_together_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? documents, str name, int window)"
        " -> (Tensor, Tensor, Tensor)"
    ),
)
def _backward(grad_BNSD: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    *saved, documents_BL, name, window = arguments
    q_BNSD, k_BKSD, v_BKSD, out_BNSD, lse_BNS = saved
    found = _EXCHANGES[name].backward(
        grad_BNSD, (q_BNSD, k_BKSD, v_BKSD, out_BNSD, lse_BNS), AttentionLayout(window or None), documents_BL
    )
    dq, dk, dv = (_placed(x, like) for x, like in zip(found, (q_BNSD, k_BKSD, v_BKSD), strict=True))
    return dq, dk, dv


@_backward.register_fake
def _(grad_BNSD: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (like_tokens(x, x.dtype) for x in arguments[:3])
    return dq, dk, dv


def _placed(x_BNSD: torch.Tensor, like_BNSD: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type of another and with memory that lies token by token, as compiled code expects it."""
    return x_BNSD.to(like_BNSD.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q_BNSD, k_BKSD, v_BKSD, documents_BL, name, window = inputs
    ctx.save_for_backward(q_BNSD, k_BKSD, v_BKSD, *output, documents_BL)
    ctx.name, ctx.window = name, window


def _gradients(ctx: Any, grad_BNSD: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    found = torch.ops.partool.attend_together_backward(grad_BNSD, *ctx.saved_tensors, ctx.name, ctx.window)
    return *found, None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)
