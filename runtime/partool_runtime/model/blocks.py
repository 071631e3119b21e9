"""Computes the attention of a block of queries to one block of keys after the other, forward and backward.

Results of queries over different keys are merged by the logarithms of their sums of exponentials (logsumexp), in
float32 or wider (Liu et al., arXiv 2310.01889; Dao et al., arXiv 2205.14135, section 3.1). A block is described by the
ranges of the sequence that form it. No mask of a whole sequence is made: most pairs need no mask, and the others
are computed in pieces.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from partool.layout.sequence import Spans
from partool_runtime.model import kernels
from partool_runtime.model.kernels import Sight, wide
from partool_runtime.model.rectangles import Rectangle, joined, pieces, rectangles, within
from partool_runtime.model.visibility import AttentionLayout, visible
from partool_runtime.torch_internals.tensors import writes

SHORT, SHORT_CPU = 512, 128
"""Maximum number of tokens of documents that one kernel call computes with masks, on a device and on a CPU. One call
per document would cost a device more; a CPU computes masked pairs too, and starts a call in microseconds.
"""


class Stretch(NamedTuple):
    """A range of a sequence that holds one or more whole documents; its tokens attend to no token outside the range."""

    start: int
    stop: int
    alone: bool
    """True if all tokens belong to one document."""


_STRETCHES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cached stretches of each tensor of documents, so that a tensor that all layers share is copied off the device once.

The tensor's version counter is stored, too: after another write to the tensor its entry is out of date.
"""


def stretches(documents_BL: torch.Tensor, most: int) -> tuple[tuple[Stretch, ...], ...] | None:
    """Return each sequence's stretches, in order; None if document numbers decrease within a sequence.

    Documents are joined to stretches of at most ``most`` tokens.
    """
    version = writes(documents_BL), most
    if documents_BL not in _STRETCHES or _STRETCHES[documents_BL][0] != version:
        _STRETCHES[documents_BL] = version, _stretches(documents_BL, most)
    cached: tuple[tuple[Stretch, ...], ...] | None = _STRETCHES[documents_BL][1]
    return cached


def _stretches(documents_BL: torch.Tensor, most: int) -> tuple[tuple[Stretch, ...], ...] | None:
    documents_BL = documents_BL.cpu()
    steps = documents_BL.diff(dim=1)
    if bool((steps < 0).any()):
        return None
    return tuple(_grouped(steps_L.nonzero().flatten().tolist(), documents_BL.shape[1], most) for steps_L in steps)


def _grouped(last: list[int], length: int, most: int) -> tuple[Stretch, ...]:
    """Return the stretches of a sequence, given the last token of each document except the final document."""
    grouped: list[Stretch] = []
    start = 0
    for stop in [*(place + 1 for place in last), length]:
        if grouped and stop - grouped[-1].start <= most:
            grouped[-1] = Stretch(grouped[-1].start, stop, alone=False)
        else:
            grouped.append(Stretch(start, stop, alone=True))
        start = stop
    return tuple(grouped)


MOST_PAIRS = 1 << 22
"""Maximum number of query-key pairs in one mask, summed over sequences and, where scores are stored, over heads."""


class BlockPair(NamedTuple):
    """A block of queries, a block of keys, and all restrictions on their attention except causality."""

    queries: Spans
    """Ranges of positions in the sequence that the queries cover, in order."""
    keys: Spans
    layout: AttentionLayout
    """Attention layout; its ``axis`` is None."""
    documents: torch.Tensor | None = None
    """Document numbers of the tokens of the whole sequence, ``[B, L]``; None if all are in one document."""


class Seen:
    """Running result of the attention of queries ``[B, N, Q, D]`` to the keys (with K heads) used so far."""

    def __init__(self, q_BNQD: torch.Tensor) -> None:
        self._q, self._width = q_BNQD, q_BNQD.shape[3]
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def meet(self, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, meeting: BlockPair) -> None:
        """Add the attention to a block of keys and values to the result; call it once per block."""
        self._width = v_BKSD.shape[3]
        for call in _Calls(meeting, self._q, v_BKSD):
            heads = call.of_queries(self._q), call.of_keys(k_BKSD), call.of_keys(v_BKSD)
            self.merge(call.part.queries, *kernels.forward(*heads, call.sight), call.sequences)

    def merge(
        self,
        queries: tuple[int, int],
        out_BNQD: torch.Tensor,
        lse_BNQ: torch.Tensor,
        sequences: tuple[int, int] | None = None,
    ) -> None:
        """Merge the result of attention to keys that were not used before, for the queries in ``range(*queries)``.

        ``lse_BNQ`` is the logsumexp over these keys; it is minus infinity for queries that see no key.
        ``sequences`` is a range in the batch (first, one past the last), by default the whole batch.
        """
        self._width = out_BNQD.shape[3]
        if self._out is None and out_BNQD.shape[0] == self._q.shape[0] and queries == (0, self._q.shape[2]):
            self._out, self._lse = out_BNQD, lse_BNQ.to(wide(self._q.dtype))
            return
        all_out, all_lse = self._wide()
        some, rows = slice(*(sequences or (None,))), slice(*queries)
        out, lse = all_out[some, :, rows], all_lse[some, :, rows]
        # Where both are minus infinity the difference is NaN, but the weight does not matter there.
        weight = torch.sigmoid(lse_BNQ - lse).nan_to_num_(0.0)[..., None]
        out += weight * (out_BNQD - out)
        torch.logaddexp(lse, lse_BNQ.to(lse.dtype), out=lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention over all keys so far, in the queries' type, and its logsumexp, in float32 or wider."""
        out, lse = (self._out, self._lse) if self._out is not None else self._wide()
        assert lse is not None
        return out.to(self._q.dtype), lse

    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of the merged result, in float32 or wider."""
        type_ = wide(self._q.dtype)
        if self._out is None:
            self._out = like_tokens(self._q, type_, width=self._width).zero_()
            self._lse = self._q.new_full(self._q.shape[:3], -torch.inf, dtype=type_)
        elif self._out.dtype != type_:
            self._out = self._out.to(type_)
        assert self._lse is not None
        return self._out, self._lse


class Returned:
    """Accumulates the gradient of a block of queries ``[B, N, Q, D]``, given the gradient of their attention result."""

    def __init__(
        self, q_BNQD: torch.Tensor, grad_BNQD: torch.Tensor, out_BNQD: torch.Tensor, lse_BNQ: torch.Tensor
    ) -> None:
        """Take the queries, the gradient of their attention result over all keys, that result, and its logsumexp."""
        self._q, self._grad, self._out, self._lse = q_BNQD, grad_BNQD, out_BNQD, lse_BNQ
        self.dq_BNQD = like_tokens(q_BNQD, wide(q_BNQD.dtype)).zero_()
        """Gradient of the queries so far, in the wide type."""

    def meet(
        self,
        keys: tuple[torch.Tensor, torch.Tensor],
        gradients: tuple[torch.Tensor, torch.Tensor],
        meeting: BlockPair,
    ) -> None:
        """Add keys' and values' gradients to ``gradients``, queries' gradient to ``dq_BNQD``, in float32 or wider."""
        for call in _Calls(meeting, self._q, keys[1]):
            inputs = call.of_queries(self._q), call.of_keys(keys[0]), call.of_keys(keys[1])
            results = call.of_queries(self._out), call.of_queries(self._lse)
            dq, dk, dv = kernels.backward(call.of_queries(self._grad), inputs, results, call.sight)
            call.of_queries(self.dq_BNQD).add_(dq)
            call.of_keys(gradients[0]).add_(dk)
            call.of_keys(gradients[1]).add_(dv)


def like_tokens(x_BNSD: torch.Tensor, dtype: torch.dtype, width: int | None = None) -> torch.Tensor:
    """Return an empty tensor with the shape of ``x_BNSD``, or with head width ``width``, stored token by token.

    Projections use this layout, so the result of attention need not be copied for the output projection.
    """
    batch, heads, length, head_dim = x_BNSD.shape
    return x_BNSD.new_empty(batch, length, heads, head_dim if width is None else width, dtype=dtype).transpose(1, 2)


class _Call(NamedTuple):
    """Arguments of one kernel call."""

    sequences: tuple[int, int]
    """Index of the first sequence in the batch, and the index after the last sequence."""
    part: Rectangle
    sight: Sight

    def of_queries(self, x_BNQ: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x_BNQ`` (one row per query) that belong to this call."""
        return x_BNQ[slice(*self.sequences), :, slice(*self.part.queries)]

    def of_keys(self, x_BKS: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x_BKS`` (one row per key) that belong to this call."""
        return x_BKS[slice(*self.sequences), :, slice(*self.part.keys)]


class _Calls:
    """The kernel calls that compute the attention of a pair of blocks."""

    def __init__(self, meeting: BlockPair, q_BNQD: torch.Tensor, v_BKSD: torch.Tensor) -> None:
        self._meeting, self._layout, self._device = meeting, meeting.layout, q_BNQD.device
        self._batch, heads = q_BNQD.shape[:2]
        self._holds_scores = kernels.holds_scores(q_BNQD, v_BKSD)
        masks = 1 if meeting.documents is None else self._batch
        self._most = max(1, MOST_PAIRS // max(1, self._batch * heads if self._holds_scores else masks))
        self._empty = self._batch * heads == 0

    def __iter__(self) -> Iterator[_Call]:
        queries, keys, layout, documents = self._meeting
        cut = self._holds_scores or documents is not None
        for rectangle in () if self._empty else (rectangles if cut else joined)(queries, keys, layout.window):
            if documents is None:
                yield from self._plain(rectangle, (0, self._batch))
            else:
                yield from self._packed(rectangle, documents)

    def _packed(self, rectangle: Rectangle, documents_BL: torch.Tensor) -> Iterator[_Call]:
        """Yield the calls of a rectangle with several documents; one that costs no more at once is not split."""
        short, most = SHORT, self._most
        if self._device.type == "cpu":
            short, most = min(short, SHORT_CPU), min(most, SHORT_CPU**2)
        by_sequence = None if _pairs(rectangle) <= most else stretches(documents_BL, short)
        if by_sequence is None:
            yield from self._masked(rectangle, (0, self._batch), documents_BL)
            return
        for number, of_sequence in enumerate(by_sequence):
            for stretch in _between(of_sequence, rectangle):
                for part in within(rectangle, stretch.start, stretch.stop, self._layout.window):
                    one = (number, number + 1)
                    yield from self._plain(part, one) if stretch.alone else self._masked(part, one, documents_BL)

    def _plain(self, part: Rectangle, sequences: tuple[int, int]) -> Iterator[_Call]:
        """Yield the calls of a rectangle in which documents do not matter."""
        if part.kind != "masked" and not self._holds_scores:
            yield _Call(sequences, part, Sight(part.kind == "causal", scale=self._layout.scale))
        else:
            yield from self._masked(part, sequences, None)

    def _masked(
        self, part: Rectangle, sequences: tuple[int, int], documents_BL: torch.Tensor | None
    ) -> Iterator[_Call]:
        """Yield the calls of a rectangle in pieces, each with a mask."""
        if documents_BL is not None:
            documents_BL = documents_BL[slice(*sequences)]
        for piece in pieces(part, self._layout.window, self._most):
            mask = _mask(piece, self._layout, documents_BL, self._device)
            yield _Call(sequences, piece, Sight(mask=mask, scale=self._layout.scale))


def _pairs(part: Rectangle) -> int:
    return (part.queries[1] - part.queries[0]) * (part.keys[1] - part.keys[0])


def _between(of_sequence: tuple[Stretch, ...], part: Rectangle) -> Iterator[Stretch]:
    """Yield the stretches that contain queries of a rectangle."""
    first = part.first_query
    past = first + part.queries[1] - part.queries[0]
    for stretch in of_sequence[bisect_right(of_sequence, first, key=lambda stretch: stretch.stop) :]:
        if stretch.start >= past:
            return
        yield stretch


def _mask(
    part: Rectangle, layout: AttentionLayout, documents_BL: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    rows, columns = part.queries[1] - part.queries[0], part.keys[1] - part.keys[0]
    queries = torch.arange(part.first_query, part.first_query + rows, device=device)
    keys = torch.arange(part.first_key, part.first_key + columns, device=device)
    if documents_BL is None:
        return visible(queries, keys, layout)
    documents_BL = documents_BL.to(device)
    of_queries = documents_BL[:, part.first_query : part.first_query + rows]
    return visible(queries, keys, layout, documents=(of_queries, documents_BL[:, part.first_key :][:, :columns]))
