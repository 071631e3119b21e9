"""Small parameters that stay gathered from step to step (ZeRO-3's ``persistent`` parameters)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from partool_runtime.torch_internals.collectives import gather_into
from partool_runtime.torch_internals.group_gather import GroupGather
from partool_runtime.torch_internals.tensors import unseen_writes

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Persistent:
    """After each optimizer step, updates the parameters that stay gathered, by one collective per data type."""

    def __init__(self, gathers: Sequence[GroupGather]) -> None:
        self._gathers = [gather for gather in gathers if gather.kept]

    def expire(self) -> None:
        """Mark the parameters as outdated, so that units gather them again unless :meth:`refresh` is called first."""
        for gather in self._gathers:
            gather.expire()

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather all persistent parameters at once, between steps; all ranks that share parameters must call this.

        Before the first step a call changes nothing: the first gather allocates the storage of the gathered parameters.
        """
        by_type: dict[torch.dtype, Pairs] = defaultdict(list)
        for gather in self._gathers:
            for shard, full in gather.refresh():
                by_type[shard.dtype].append((shard, full))
        for pairs in by_type.values():
            self._exchange(pairs)

    def _exchange(self, pairs: Pairs) -> None:
        ranks = self._gathers[0].ranks
        sizes = [shard.numel() for shard, _ in pairs]
        sent = torch.cat([shard for shard, _ in pairs])
        gathered = sent.new_empty(ranks.size() * sent.numel())
        gather_into(gathered, sent, ranks, asynchronous=False)
        targets = [full.view(ranks.size(), -1) for _, full in pairs]
        with unseen_writes(targets):
            torch.split_with_sizes_copy(gathered.view(ranks.size(), -1), sizes, dim=1, out=targets)
