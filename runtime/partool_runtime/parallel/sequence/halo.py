"""Attention within a window: each rank receives from other ranks only the keys that its queries see.

Values are exchanged together with their keys. If shares are contiguous, a rank receives the keys of the
``window - 1`` tokens before its share from all ranks that hold some of these tokens. Other orders of tokens work, too.
"""

from __future__ import annotations

from functools import cache

import torch

from partool.layout.reach import needed
from partool.layout.sequence import Spans, bounds, tokens
from partool_runtime.model.attention import AttentionLayout
from partool_runtime.model.blocks import BlockPair, Returned, Seen
from partool_runtime.model.kernels import wide
from partool_runtime.parallel.sequence.keys import KeysForm, picked, rows
from partool_runtime.parallel.sequence.op import Post, send
from partool_runtime.parallel.sequence.types import Exchange, SequenceTeam


class WithHalo:
    """An :class:`Exchange` that uses :class:`Halo` in layers with windows, and another exchange in all other layers."""

    def __init__(self, team: SequenceTeam, full: Exchange) -> None:
        self._length, self._halo, self._full = team.length, Halo(team), full

    def forward(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`."""
        return self._of(layout).forward(q_BNSD, k_BKSD, v_BKSD, layout, documents_BL)

    def backward(
        self,
        grad_BNSD: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`."""
        return self._of(layout).backward(grad_BNSD, saved, layout, documents_BL)

    def _of(self, layout: AttentionLayout) -> Exchange:
        return self._full if layout.window is None or layout.window >= self._length else self._halo


class Halo:
    """An :class:`Exchange` of the keys and values that are within the window of other ranks' queries."""

    def __init__(self, team: SequenceTeam) -> None:
        self._team, self._local_spans = team, team.shares[team.rank]
        self._given = cache(self._given_of)
        self._taken = cache(self._taken_of)

    def forward(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`; attention to this rank's own keys is computed while other ranks' keys arrive."""
        seen, form = Seen(q_BNSD), KeysForm(k_BKSD, v_BKSD)
        local_block = form.packed()
        post, others = self._exchange(local_block, layout)
        seen.meet(*form.pair(local_block), BlockPair(self._local_spans, self._local_spans, layout, documents_BL))
        post.wait()
        seen.meet(*form.pair(others), BlockPair(self._local_spans, self._spans(layout), layout, documents_BL))
        return seen.result()

    def backward(
        self,
        grad_BNSD: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`; gradients of other ranks' keys are sent while this rank's keys get their gradients."""
        q_BNSD, k_BKSD, v_BKSD, out_BNSD, lse_BNS = saved
        back, form = Returned(q_BNSD, grad_BNSD, out_BNSD, lse_BNS), KeysForm(k_BKSD, v_BKSD)
        local_block = form.packed()
        post, others = self._exchange(local_block, layout)
        of_others, ours = (torch.zeros_like(block, dtype=wide(block.dtype)) for block in (others, local_block))
        post.wait()
        back.meet(
            form.pair(others),
            form.pair(of_others),
            BlockPair(self._local_spans, self._spans(layout), layout, documents_BL),
        )
        post, returned = self._return(of_others, layout)
        back.meet(
            form.pair(local_block),
            form.pair(ours),
            BlockPair(self._local_spans, self._local_spans, layout, documents_BL),
        )
        post.wait()
        for stretches, gradient in returned:
            row = 0
            for low, high in stretches:
                ours[low:high] += gradient[row : row + high - low]
                row += high - low
        return back.dq_BNQD, *form.pair(ours)

    def _exchange(self, local_block: torch.Tensor, layout: AttentionLayout) -> tuple[Post, torch.Tensor]:
        """Start to exchange keys that other ranks see; return the transfer and the receive buffer, ordered by rank."""
        taken = self._taken(layout.window)
        others = local_block.new_empty(sum(tokens(spans) for _, spans in taken), *local_block.shape[1:])
        letters = [(rank, picked(local_block, stretches)) for rank, stretches in self._given(layout.window)]
        return send(letters, self._by_rank(others, layout), self._team.group), others

    def _return(
        self, of_others: torch.Tensor, layout: AttentionLayout
    ) -> tuple[Post, list[tuple[list[tuple[int, int]], torch.Tensor]]]:
        """Start to send gradients to the keys' owners; return the transfer, and pairs of row ranges and receive buffer.

        The row ranges are those of this rank's keys whose gradients the buffer receives.
        """
        returned = [
            (rank, stretches, of_others.new_empty(sum(high - low for low, high in stretches), *of_others.shape[1:]))
            for rank, stretches in self._given(layout.window)
        ]
        wanted = [(rank, gradient) for rank, _, gradient in returned]
        post = send(self._by_rank(of_others, layout), wanted, self._team.group)
        return post, [(stretches, gradient) for _, stretches, gradient in returned]

    def _by_rank(self, others: torch.Tensor, layout: AttentionLayout) -> list[tuple[int, torch.Tensor]]:
        """Return (other rank, part of the buffer ``others`` that holds the other rank's tokens) pairs."""
        taken = self._taken(layout.window)
        stretches = bounds([tokens(spans) for _, spans in taken])
        return [(rank, others[low:high]) for (rank, _), (low, high) in zip(taken, stretches, strict=True)]

    def _spans(self, layout: AttentionLayout) -> Spans:
        return tuple(span for _, spans in self._taken(layout.window) for span in spans)

    def _given_of(self, window: int | None) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return (other rank, row ranges of this rank's tokens that the other rank sees) pairs."""
        seen = [(rank, needed(share, self._local_spans, window)) for rank, share in self._others()]
        return [(rank, rows(self._local_spans, spans)) for rank, spans in seen if spans]

    def _taken_of(self, window: int | None) -> list[tuple[int, Spans]]:
        """Return (other rank, spans of the other rank's tokens that this rank sees) pairs."""
        seen = [(rank, needed(self._local_spans, share, window)) for rank, share in self._others()]
        return [(rank, spans) for rank, spans in seen if spans]

    def _others(self) -> list[tuple[int, Spans]]:
        return [(rank, share) for rank, share in enumerate(self._team.shares) if rank != self._team.rank]
