"""The ranks of a ring and their communicators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from partool_runtime.parallel.pipeline.wires import TIMEOUT_S, backend_limit

Group = dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class PipelineRing:
    """The ring that a rank is in. All groups hold the same ranks, numbered from 0 within the group.

    Independent transfers have separate communicators: a GPU executes the transfers of one communicator in the order of
    posting, so a transfer that waits would block the later ones.
    """

    everyone: Group
    """Group for sums over the ring."""
    relay: Group
    """Group for weights from rank to rank."""
    deal: Group
    """Group for weights from the rank that owns their stage to rank 0."""
    gradients: Group
    """Group for gradients from rank to rank."""
    home: Group
    """Group for gradients from the last rank to the rank that owns their stage."""

    @property
    def rank(self) -> int:
        """Place of this rank in the ring."""
        return self.everyone.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.everyone.size()


def open_ring(rings: Sequence[Sequence[int]], *, timeout_s: float = TIMEOUT_S) -> PipelineRing:
    """Return the ring of this rank. Every rank of the world calls this with the same lists of global ranks.

    ``timeout_s`` is the passes' timeout; the backend's own timeout is longer, so that the error can name the action.
    """
    mine: PipelineRing | None = None
    for ranks in rings:
        groups = [dist.new_group(list(ranks), timeout=backend_limit(timeout_s)) for _ in range(5)]
        if dist.get_rank() in ranks:
            mine = PipelineRing(*groups)
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the rings {rings}")
    return mine
