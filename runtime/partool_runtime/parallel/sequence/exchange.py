"""All-to-all of Ulysses between tokens and heads (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1), for any sizes.

Outside of attention a rank holds some tokens of all heads; inside of attention it holds all tokens of some heads.
Messages have the layout ``[tokens, batch, heads, width]``, so that the parts of several ranks form one contiguous
tensor. Heads of keys and values are sent to every rank whose query heads read them; their gradients are summed in
float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from partool.layout.sequence import Deal, Spans, bounds, deal_heads, tokens
from partool_runtime import deferral
from partool_runtime.parallel.sequence.op import finished
from partool_runtime.torch_internals.collectives import start_exchange

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention (q ``[B, n, L, D]``, k ``[B, m, L, D]``, v ``[B, m, L, V]``) → ``[B, n, L, V]``, n a multiple of m."""
Heads = tuple[int, int]


class Way(NamedTuple):
    """Sizes and heads of one exchanged tensor."""

    batch: int
    width: int
    """Width of a head."""
    heads: tuple[Heads, ...]
    """Each rank's heads in attention: the index of its first head, and the index after its last head."""
    all_heads: int


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Group of ranks that exchange tokens for heads. Each method of each model has a separate object."""

    group_name: str
    rank: int
    """Place of this rank in the group."""
    shares: tuple[Spans, ...]
    """Spans of the tokens that each rank holds, in any order; all ranks together hold all tokens of attention."""

    @property
    def sizes(self) -> list[int]:
        """Number of tokens that each rank holds."""
        return [tokens(spans) for spans in self.shares]

    def deal(self, queries: int, keys: int) -> tuple[Deal, ...]:
        """Return the query heads and key heads that each rank works on."""
        return deal_heads(queries, keys, len(self.shares))

    def __call__(self, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, core: Core) -> torch.Tensor:
        """Return attention of this rank's tokens, ``[B, N, S, V]``; ``core`` computes all tokens of some heads."""
        of_queries, of_keys = self.ranges(q_BNSD.shape[1], k_BKSD.shape[1])
        travelling = [self.start(k_BKSD, of_keys), self.start(q_BNSD, of_queries), self.start(v_BKSD, of_keys)]
        return self.back(*self.compute(travelling, core))

    def ranges(self, queries: int, keys: int) -> tuple[tuple[Heads, ...], tuple[Heads, ...]]:
        """Return the range of query heads of each rank, and the range of key heads of each rank."""
        deals = self.deal(queries, keys)
        return tuple(deal.queries for deal in deals), tuple(deal.keys for deal in deals)

    def start(self, x_BNSD: torch.Tensor, heads: tuple[Heads, ...]) -> Started:
        """Start to send a tensor's heads to the ranks that work on them.

        Work between this call and :meth:`compute` overlaps with the transfer. Gradients return in the opposite order:
        the tensor started last gets its gradient first, and its projection's backward pass overlaps with the other
        transfers. So the first and the last tensor to start should be small; a good order is keys, queries, values.
        """
        batch, all_heads, _, width = x_BNSD.shape
        way = Way(batch, width, heads, all_heads)
        sent, received = _Start.apply(x_BNSD, way, self)  # type: ignore[no-untyped-call]
        return Started(sent, received, way)

    def compute(self, travelling: list[Started], core: Core) -> tuple[torch.Tensor, Way]:
        """Return the result of ``core`` for all tokens of this rank's heads, and the ``Way`` of this result.

        ``travelling`` holds the keys, queries and values whose exchange is in flight. The list is emptied, so that the
        sent tensors are freed.
        """
        ways = tuple(started.way for started in travelling)
        tensors = [tensor for started in travelling for tensor in (started.sent, started.received)]
        travelling.clear()
        k_BkLD, q_BnLD, v_BkLV = _Arrive.apply(ways, self, *tensors)  # type: ignore[no-untyped-call]
        del tensors
        keys, queries, values = ways
        way = Way(values.batch, values.width, queries.heads, queries.all_heads)
        if q_BnLD.shape[1] == 0:
            return _nothing(q_BnLD, k_BkLD, v_BkLV), way
        read = self.deal(queries.all_heads, keys.all_heads)[self.rank]
        copies = read.keys_of_queries(queries.all_heads, keys.all_heads)
        return core(q_BnLD, grouped(k_BkLD, copies), grouped(v_BkLV, copies)), way

    def back(self, out_BnLV: torch.Tensor, way: Way) -> torch.Tensor:
        """Send the results back; return all heads of this rank's tokens, ``[B, N, S, V]``."""
        returned: torch.Tensor = _Return.apply(out_BnLV, way, self)  # type: ignore[no-untyped-call]
        return returned

    def projected(self, out_BnLV: torch.Tensor, way: Way, linear: nn.Linear) -> torch.Tensor:
        """Return ``linear`` applied to all heads of this rank's tokens, ``[B, S, H]``.

        In the backward pass the heads' gradients are sent while the matrix's gradients are computed.
        """
        out: torch.Tensor = _Project.apply(out_BnLV, linear.weight, linear.bias, way, self)  # type: ignore[no-untyped-call]
        return out


class Started(NamedTuple):
    """A tensor whose exchange is in flight."""

    sent: torch.Tensor
    """Tensor that is sent, in autograd's graph; autograd may pass on its gradient while the gradient is in flight."""
    received: torch.Tensor
    """Tensor that is received; it must not be read before it has arrived."""
    way: Way


def grouped(x_BmLD: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    """Return heads of keys or values, copied if otherwise some of them would serve more query heads than others.

    ``heads`` is the index of the head that each query head reads. If the heads are copied, each query head gets a copy.
    """
    if len({heads.count(head) for head in heads}) == 1:
        return x_BmLD
    return torch.cat([x_BmLD[:, head : head + 1] for head in heads], dim=1)


def _nothing(q_BnLD: torch.Tensor, k_BkLD: torch.Tensor, v_BkLV: torch.Tensor) -> torch.Tensor:
    """Return attention of zero heads. The result depends on all three inputs, since all ranks exchange gradients."""
    return v_BkLV + q_BnLD.sum() + k_BkLD.sum()


class _Start(torch.autograd.Function):
    """Starts to send heads to the ranks that work on them; the backward pass waits for the heads' gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_BNSD: torch.Tensor, way: Way, exchange: HeadExchange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.way, ctx.exchange = way, exchange  # type: ignore[attr-defined]
        sent, received = _leave(x_BNSD, way, exchange)
        ctx.mark_non_differentiable(received)
        if not torch.compiler.is_compiling():  # the compiler does not support this call
            # Otherwise every backward pass would allocate a zero gradient for ``received``, which is never read.
            ctx.set_materialize_grads(False)
        return sent, received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _joined(finished(grad), ctx.way, ctx.exchange), None, None


class _Arrive(torch.autograd.Function):
    """Waits for all tokens of a rank's heads; the backward pass starts to send their gradients back, last tensor first.

    One function handles all tensors, so that all ranks send gradients in the same order.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, ways: tuple[Way, ...], exchange: HeadExchange, *travelling: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.ways, ctx.exchange = ways, exchange  # type: ignore[attr-defined]
        return tuple(_all_tokens(finished(x), way, exchange) for x, way in zip(travelling[1::2], ways, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input_grads: list[torch.Tensor | None] = []
        for grad, way in zip(reversed(grads), reversed(ctx.ways), strict=True):
            input_grads += [None, _go_home(grad, way, ctx.exchange)]
        return None, None, *reversed(input_grads)


class _Return(torch.autograd.Function):
    """Exchanges all tokens of a rank's heads for all heads of the rank's tokens; the backward pass does the reverse."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BnLD: torch.Tensor, way: Way, exchange: HeadExchange) -> torch.Tensor:
        ctx.way, ctx.exchange = way, exchange  # type: ignore[attr-defined]
        return _joined(finished(_go_home(x_BnLD, way, exchange)), way, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, received = _leave(grad, ctx.way, ctx.exchange)
        return _all_tokens(finished(received), ctx.way, ctx.exchange), None, None


class _Project(torch.autograd.Function):
    """Does what :class:`_Return` does, and multiplies the result by a matrix.

    The backward pass sends the heads' gradients before it computes the matrix's gradients.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd gives it tensors by position
        ctx: FunctionCtx,
        x_BnLD: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        way: Way,
        exchange: HeadExchange,
    ) -> torch.Tensor:
        x_BSX = _joined(finished(_go_home(x_BnLD, way, exchange)), way, exchange).transpose(1, 2).flatten(-2)
        ctx.save_for_backward(x_BSX, weight)
        ctx.way, ctx.exchange = way, exchange  # type: ignore[attr-defined]
        return F.linear(x_BSX, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_BSX, weight = ctx.saved_tensors
        way: Way = ctx.way
        grad_BSND = (grad @ weight).view(*grad.shape[:2], way.all_heads, way.width)
        _, received = _leave(grad_BSND.transpose(1, 2), way, ctx.exchange)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_weight = deferral.of_weight(x_BSX, grad) if needs_weight else None
        of_bias = deferral.of_bias(grad) if needs_bias else None
        return _all_tokens(finished(received), way, ctx.exchange), of_weight, of_bias, None, None


def _leave(x_BNSD: torch.Tensor, way: Way, exchange: HeadExchange) -> tuple[torch.Tensor, torch.Tensor]:
    """Start to send heads to the ranks that work on them; return the sent tensor and the tensor to be received."""
    sent_sizes, received_sizes = _sizes(way, exchange)
    sent = x_BNSD.new_empty(sum(sent_sizes))
    x_SBND = x_BNSD.permute(2, 0, 1, 3)
    for (first, stop), (start, end) in zip(way.heads, bounds(sent_sizes), strict=True):
        part_SBnD = x_SBND[:, :, first:stop]
        sent[start:end].view(part_SBnD.shape).copy_(part_SBnD)
    return sent, start_exchange(sent, sent_sizes, received_sizes, exchange.group_name)


def _all_tokens(received: torch.Tensor, way: Way, exchange: HeadExchange) -> torch.Tensor:
    """Return the received tensor, all tokens of a rank's heads, as ``[B, n, L, D]``."""
    first, stop = way.heads[exchange.rank]
    rows_LBnD = received.view(sum(exchange.sizes), way.batch, stop - first, way.width)
    return _pick(rows_LBnD, _in_sequence(exchange.shares)).permute(1, 2, 0, 3)


def _go_home(x_BnLD: torch.Tensor, way: Way, exchange: HeadExchange) -> torch.Tensor:
    """Start to send tokens of this rank's heads to the tokens' ranks; return the tensor to be received."""
    received_sizes, sent_sizes = _sizes(way, exchange)
    rows_LBnD = _pick(x_BnLD.permute(2, 0, 1, 3), [span for spans in exchange.shares for span in spans])
    return start_exchange(rows_LBnD.reshape(-1), sent_sizes, received_sizes, exchange.group_name)


def _joined(received: torch.Tensor, way: Way, exchange: HeadExchange) -> torch.Tensor:
    """Return a rank's tokens, received from the ranks that work on the heads, as ``[B, N, S, D]``."""
    mine = exchange.sizes[exchange.rank]
    parts_BSnD = [
        received[start:end].view(mine, way.batch, stop - first, way.width).transpose(0, 1)
        for (first, stop), (start, end) in zip(way.heads, bounds(_sizes(way, exchange)[0]), strict=True)
    ]
    worked_on = [heads for heads in way.heads if heads[0] < heads[1]]
    if all(before[1] == after[0] for before, after in pairwise(worked_on)):
        return torch.cat(parts_BSnD, dim=2).transpose(1, 2)
    wide = torch.promote_types(received.dtype, torch.float32)
    total_BSND = received.new_zeros(way.batch, mine, way.all_heads, way.width, dtype=wide)
    for (first, stop), part_BSnD in zip(way.heads, parts_BSnD, strict=True):
        total_BSND[:, :, first:stop] += part_BSnD
    return total_BSND.to(received.dtype).transpose(1, 2)


def _sizes(way: Way, exchange: HeadExchange) -> tuple[list[int], list[int]]:
    """Return how many elements :func:`_leave` sends to each rank, and how many this rank receives from each rank."""
    sizes, each = exchange.sizes, way.batch * way.width
    first, stop = way.heads[exchange.rank]
    return [sizes[exchange.rank] * each * (b - a) for a, b in way.heads], [n * each * (stop - first) for n in sizes]


def _in_sequence(shares: Sequence[Spans]) -> list[tuple[int, int]]:
    """Return each token span's row range in the concatenated shares; spans are in the order of the sequence."""
    spans = [span for of_rank in shares for span in of_rank]
    rows = bounds([stop - start for start, stop in spans])
    return [row for _, row in sorted(zip(spans, rows, strict=True))]


def _pick(rows: torch.Tensor, stretches: list[tuple[int, int]]) -> torch.Tensor:
    """Return the row ranges ``stretches``, concatenated; if the ranges are consecutive, return ``rows`` itself."""
    if all(before[1] == after[0] for before, after in pairwise(stretches)):
        return rows
    return torch.cat([rows[start:stop] for start, stop in stretches])
