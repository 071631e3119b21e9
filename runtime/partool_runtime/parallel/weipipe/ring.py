"""The ranks of a ring and their communicators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from partool_runtime.parallel.pipeline.wires import TIMEOUT_S, backend_limit

Group = dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class PipelineRing:
    """The ring that a rank is in. Ranks count from 0 in each of the groups, which hold the same ranks.

    What may wait for different things has a communicator of its own: on one, a GPU works transfers off in the order in
    which they are posted, and one that waits would hold up those behind it.
    """

    everyone: Group
    """For sums over the ring."""
    relay: Group
    """Weights from rank to rank."""
    deal: Group
    """Weights from their owner to rank 0."""
    gradients: Group
    """Gradients from rank to rank."""
    home: Group
    """Gradients from the last rank to their owner."""

    @property
    def rank(self) -> int:
        """The place in the ring."""
        return self.everyone.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.everyone.size()


def open_ring(rings: Sequence[Sequence[int]], *, timeout_s: float = TIMEOUT_S) -> PipelineRing:
    """Return the ring of this rank. Every rank of the world calls this with the same lists of global ranks.

    ``timeout_s`` is that of the passes; the backend itself gives up later, so that the error can say what waits.
    """
    mine: PipelineRing | None = None
    for ranks in rings:
        groups = [dist.new_group(list(ranks), timeout=backend_limit(timeout_s)) for _ in range(5)]
        if dist.get_rank() in ranks:
            mine = PipelineRing(*groups)
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the rings {rings}")
    return mine
