"""Ring attention, for any order of tokens: keys and values go from rank to rank (Liu et al., arXiv 2310.01889).

A block of keys is passed on up to the last rank that sees any of its keys. In the backward pass the block's gradient
starts at the first rank after the owner and follows the block; the last rank sends the gradient to the owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool.layout.reach import reach
from partool.plan.layout import Layout
from partool_runtime.model.attention import AttentionLayout
from partool_runtime.model.blocks import BlockPair, Returned, Seen
from partool_runtime.model.decoder import Block
from partool_runtime.model.kernels import wide
from partool_runtime.parallel.sequence.halo import WithHalo
from partool_runtime.parallel.sequence.keys import KeysForm
from partool_runtime.parallel.sequence.op import ExchangeAttend, Post, send
from partool_runtime.parallel.sequence.types import SequenceTeam


def put(blocks: Sequence[Block], team: SequenceTeam, layout: Layout) -> None:
    """Make layers use ring attention over the team; layers with windows fetch only keys that their queries see."""
    attend = ExchangeAttend(WithHalo(team, KeyRing(team)))
    for block in blocks:
        block.attention.core = attend


class KeyRing:
    """An :class:`Exchange` that passes keys and values around a ring of a team's ranks, in the order of the team."""

    def __init__(self, team: SequenceTeam) -> None:
        self._team, self._reach = team, reach(team.shares)

    def forward(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`; the next block of keys is received while the current block is computed."""
        seen, form = Seen(q_BNSD), KeysForm(k_BKSD, v_BKSD)
        block = form.packed()
        for step in range(self._team.ranks):
            post, following = self._pass_on(step, block, form)
            if step <= self._reach[self._source(step)]:
                seen.meet(*form.pair(block), self._meeting(step, layout, documents_BL))
            post.wait()
            block = following
        return seen.result()

    def backward(
        self,
        grad_BNSD: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`; gradients are sent one step after their keys."""
        q_BNSD, k_BKSD, v_BKSD, out_BNSD, lse_BNS = saved
        back, form = Returned(q_BNSD, grad_BNSD, out_BNSD, lse_BNS), KeysForm(k_BKSD, v_BKSD)
        block = form.packed()
        ours = came = torch.zeros_like(block, dtype=wide(block.dtype))
        home = torch.zeros_like(ours)
        travels = Post([], [])
        for step in range(self._team.ranks):
            post, following = self._pass_on(step, block, form)
            gradient = ours if step == 0 else torch.zeros_like(block, dtype=ours.dtype)
            if step <= self._reach[self._source(step)]:
                back.meet(form.pair(block), form.pair(gradient), self._meeting(step, layout, documents_BL))
            travels.wait()
            if 1 < step <= self._reach[self._source(step)]:
                gradient += came
            if step > 0:
                travels, came = self._follow(step, gradient, home, form)
            post.wait()
            block = following
        travels.wait()
        ours += home
        return back.dq_BNQD, *form.pair(ours)

    def _source(self, step: int) -> int:
        """Return the rank whose keys this rank would hold at a step if every block went around the whole ring."""
        return (self._team.rank - step) % self._team.ranks

    def _meeting(self, step: int, layout: AttentionLayout, documents_BL: torch.Tensor | None) -> BlockPair:
        shares = self._team.shares
        return BlockPair(shares[self._team.rank], shares[self._source(step)], layout, documents_BL)

    def _receive_buffer(self, step: int, form: KeysForm, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer for the block that the previous rank sends for a step; empty if no block comes."""
        source = self._source(step)
        comes = step < self._team.ranks and step <= self._reach[source]
        return form.room(self._team.sizes[source] if comes else 0, dtype)

    def _pass_on(self, step: int, block: torch.Tensor, form: KeysForm) -> tuple[Post, torch.Tensor]:
        """Start to send a block to the next rank, if a later rank needs it; return the transfer and the next block."""
        following = self._receive_buffer(step + 1, form, block.dtype)
        goes = step < self._reach[self._source(step)]
        return self._send([(1, block)] if goes else [], [(-1, following)]), following

    def _follow(
        self, step: int, gradient: torch.Tensor, home: torch.Tensor, form: KeysForm
    ) -> tuple[Post, torch.Tensor]:
        """Start to send a block's gradient to the next rank or the owner; return the transfer and the next gradient.

        All ranks exchange the gradient of a step after the block of this step: messages are matched by their order.
        """
        source, rank = self._source(step), self._team.rank
        came = self._receive_buffer(step + 1, form, gradient.dtype)
        letters = []
        if step <= self._reach[source]:
            letters.append((1 if step < self._reach[source] else -step, gradient))
        wanted = [(-1, came)]
        if step == self._reach[rank]:
            wanted.append((step, home))
        return self._send(letters, wanted), came

    def _send(self, letters: list[tuple[int, torch.Tensor]], wanted: list[tuple[int, torch.Tensor]]) -> Post:
        """Start sends and receives; peers are given as offsets from this rank in the ring."""
        rank, ranks = self._team.rank, self._team.ranks
        out, into = ([((rank + step) % ranks, tensor) for step, tensor in way] for way in (letters, wanted))
        return send(out, into, self._team.group)
