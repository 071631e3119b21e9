"""Partition of a parameter over tensor-parallel ranks, as data that planner and runtime share.

There are five styles. ``column`` cuts output widths, and outputs stay sharded. ``column_gathered`` also cuts output
widths, and outputs are all-gathered. ``row`` cuts input widths, and outputs are summed (Megatron-LM, arXiv 1909.08053,
section 3). ``vocabulary`` cuts the rows of the vocabulary. With ``replicated`` every rank has the whole parameter.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from partool.spec.parallel import Style

__all__ = ["Cut", "Gradients", "Partition", "Range", "Style", "chunks"]
Gradients = Literal["whole", "summed"]
"""Gradients of values that several ranks hold: whole if each rank computes the whole gradient, summed if each rank
computes a part of the gradient."""
Range = tuple[int, int]
"""First and one-past-last index."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Cut(_Record):
    """The cut of one dimension of a parameter."""

    dim: int
    ranges: tuple[tuple[Range, ...], ...]
    """For each tensor rank, the ranges of the dimension that it holds, in the order in which it holds them. A rank that
    holds nothing has no ranges. Several ranks may hold the same range."""


class Partition(_Record):
    """Partition of a parameter, or of the same parameter in every layer."""

    name: str
    """Name of the parameter; ``*`` stands for the layer's number if all layers have the same partition."""
    count: int = 1
    """Number of parameters that this record stands for."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    style: Style
    cuts: tuple[Cut, ...] = ()
    """Cuts, one per dimension that is cut: none for a replicated parameter, up to two in 2-D tensor parallelism."""
    gradients: Gradients = "whole"
    summed_outputs: tuple[Range, ...] = ()
    """Range of a replicated matrix's outputs that every head reads. The gradient of these outputs is summed over the
    ranks. (Used for the rotary part of latent attention's keys, arXiv 2405.04434, section 2.1.3.)"""
    rule: str
    """Rule that decided: ``pattern '…'``, ``preset NAME``, ``tp_plan``, ``structure``."""
    why: str = ""
    """Reason in words."""

    def spans(self, rank: int) -> tuple[tuple[Range, ...], ...]:
        """Return, for each dimension of the parameter, the ranges that a tensor rank holds."""
        ranges: list[tuple[Range, ...]] = [((0, size),) for size in self.shape]
        for cut in self.cuts:
            ranges[cut.dim] = cut.ranges[rank]
        return tuple(ranges)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor rank's shard."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.spans(rank))

    def holders(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the tensor ranks, in order, that have the same shard as ``rank``, including ``rank``."""
        mine = self.spans(rank)
        return tuple(other for other in range(ranks) if self.spans(other) == mine)


def chunks(size: int, ranks: int) -> list[Range]:
    """Cut ``size`` as ``torch.chunk`` does: parts have ceil(size / ranks) elements, the last parts fewer or none.

    https://docs.pytorch.org/docs/stable/generated/torch.chunk.html; 7 over 3 is 3, 3, 1.
    """
    each = -(-size // ranks)
    return [(min(rank * each, size), min((rank + 1) * each, size)) for rank in range(ranks)]
