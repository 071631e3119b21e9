"""Attention that gathers all keys and values in one collective; it works with any mask and any order of tokens.

The training of Llama 3 used this method (arXiv 2407.21783, section 3.3.2). Only one layer at a time
holds keys and values of the whole sequence: the backward pass gathers them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from partool.layout.sequence import Spans
from partool.plan.layout import Layout
from partool_runtime.model.attention import AttentionLayout
from partool_runtime.model.blocks import BlockPair, Returned, Seen
from partool_runtime.model.decoder import Block
from partool_runtime.model.kernels import wide
from partool_runtime.parallel.sequence.halo import WithHalo
from partool_runtime.parallel.sequence.keys import KeysForm
from partool_runtime.parallel.sequence.op import ExchangeAttend, waiting
from partool_runtime.parallel.sequence.types import SequenceTeam
from partool_runtime.torch_internals.collectives import gather_into, scatter_sum_into


def put(blocks: Sequence[Block], team: SequenceTeam, layout: Layout) -> None:
    """Make layers gather the team's keys and values; layers with windows fetch only keys that their queries see."""
    attend = ExchangeAttend(WithHalo(team, Gather(team)))
    for block in blocks:
        block.attention.core = attend


class Gather:
    """An :class:`Exchange` that all-gathers all keys and values."""

    def __init__(self, team: SequenceTeam) -> None:
        self._team, self._local_spans, self._most = team, team.shares[team.rank], max(team.sizes)
        self._runs = self._others()

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
        gathered, work = self._gather(form)
        seen.meet(k_BKSD, v_BKSD, BlockPair(self._local_spans, self._local_spans, layout, documents_BL))
        with waiting():
            work.wait()
        for (low, high), spans in self._runs:
            seen.meet(*form.pair(gathered[low:high]), BlockPair(self._local_spans, spans, layout, documents_BL))
        return seen.result()

    def backward(
        self,
        grad_BNSD: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`; gradients of all keys are reduce-scattered at the end."""
        q_BNSD, k_BKSD, v_BKSD, out_BNSD, lse_BNS = saved
        back, form = Returned(q_BNSD, grad_BNSD, out_BNSD, lse_BNS), KeysForm(k_BKSD, v_BKSD)
        gathered, work = self._gather(form)
        gradient = torch.zeros_like(gathered, dtype=wide(gathered.dtype))
        first, size = self._team.rank * self._most, k_BKSD.shape[2]
        meeting = BlockPair(self._local_spans, self._local_spans, layout, documents_BL)
        back.meet((k_BKSD, v_BKSD), form.pair(gradient[first : first + size]), meeting)
        with waiting():
            work.wait()
        for (low, high), spans in self._runs:
            meeting = BlockPair(self._local_spans, spans, layout, documents_BL)
            back.meet(form.pair(gathered[low:high]), form.pair(gradient[low:high]), meeting)
        mine = gradient.new_empty(self._most, *gradient.shape[1:])
        with waiting():
            scatter_sum_into(mine, gradient, self._team.group)
        return back.dq_BNQD, *form.pair(mine[:size])

    def _gather(self, form: KeysForm) -> tuple[torch.Tensor, dist.Work]:
        """Start the all-gather; return its output buffer and the transfer.

        In the buffer each rank's rows are padded to the largest number of rows of any rank.
        """
        mine = form.packed()
        if mine.shape[0] < self._most:
            mine = torch.cat([mine, form.room(self._most - mine.shape[0]).zero_()])
        gathered = form.room(self._most * self._team.ranks)
        return gathered, gather_into(gathered, mine, self._team.group, asynchronous=True)

    def _others(self) -> list[tuple[tuple[int, int], Spans]]:
        """Return (row range in the gathered buffer, spans of the rows' tokens) pairs of the other ranks' tokens.

        Adjacent row ranges are merged.
        """
        runs: list[tuple[tuple[int, int], Spans]] = []
        for rank, share in enumerate(self._team.shares):
            start, stop = rank * self._most, rank * self._most + self._team.sizes[rank]
            if rank == self._team.rank or start == stop:
                continue
            if runs and runs[-1][0][1] == start:
                (first, _), spans = runs[-1]
                runs[-1] = (first, stop), (*spans, *share)
            else:
                runs.append(((start, stop), share))
        return runs
