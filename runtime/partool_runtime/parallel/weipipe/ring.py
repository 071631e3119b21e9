"""The place of a rank in a ring, and the ring's communicators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from partool_runtime.groups import Groups, Parts
from partool_runtime.parallel.pipeline.wires import MOST_BLOCKS, TIMEOUT_S, backend_limit

Group = dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class PipelineRing:
    """The ring that a rank is in. All groups hold the same ranks, numbered from 0 within the group.

    Independent transfers have separate communicators: a GPU executes the transfers of one communicator in the order of
    posting, so a transfer that waits would block the later ones.
    """

    rank: int
    """Place of this rank in the ring."""
    size: int
    """Number of ranks."""
    relay: Group
    """Group for weights from rank to rank."""
    deal: Group
    """Group for weights from the rank that owns their stage to rank 0."""
    gradients: Group
    """Group for gradients from rank to rank."""
    home: Group
    """Group for gradients from the last rank to the rank that owns their stage."""


def open_ring(groups: Groups, rings: Parts, *, timeout_s: float = TIMEOUT_S) -> PipelineRing:
    """Return the ring of this rank. Every rank of the world calls this with the same lists of global ranks.

    ``timeout_s`` is the passes' timeout; the backend's own timeout is longer, so that the error can name the action.
    """
    mine = next((ring for ring in rings if dist.get_rank() in ring), None)
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the rings {rings}")
    open_one = partial(groups.of, rings, timeout=backend_limit(timeout_s), most_blocks=MOST_BLOCKS)
    opened = [open_one(f"weipipe {purpose}") for purpose in ("relay", "deal", "gradients", "home")]
    return PipelineRing(mine.index(dist.get_rank()), len(mine), *(group or groups.alone() for group in opened))
