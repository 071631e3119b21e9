"""How a parameter is laid over tensor-parallel ranks, as data that planner and runtime share.

Styles: ``column``, output widths are cut and stay so; ``column_gathered``, the output is gathered; ``row``, input
widths are cut and the results summed (Megatron-LM, arXiv 1909.08053, section 3); ``vocabulary``, rows of tokens;
``replicated``, every rank has all.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from partool.spec.parallel import Style

__all__ = ["Cut", "Gradients", "Partition", "Range", "Style", "chunks"]
Gradients = Literal["whole", "summed"]
"""Of values that several ranks hold: whole where each computes the whole gradient, summed where each has a part."""
Range = tuple[int, int]
"""First and one-past-last index."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Cut(_Record):
    """One dimension of a parameter that is cut."""

    dim: int
    ranges: tuple[tuple[Range, ...], ...]
    """Of each tensor rank, the ranges of the dimension that it holds, in the order in which it holds them; none: it
    holds nothing. Ranks may hold the same."""


class Partition(_Record):
    """A parameter, or the same one of every layer."""

    name: str
    """Of the parameter; ``*`` stands for the numbers of layers where all of them are laid out alike."""
    count: int = 1
    """Parameters that the row stands for."""
    shape: tuple[int, ...]
    """Of the whole."""
    style: Style
    cuts: tuple[Cut, ...] = ()
    """None where it is replicated; two in two-dimensional tensor parallelism."""
    gradients: Gradients = "whole"
    summed_outputs: tuple[Range, ...] = ()
    """Of a replicated matrix, widths of the output that every head reads: the gradient that comes back for them is
    summed over the ranks (the rotary part of latent attention's keys, arXiv 2405.04434, section 2.1.3)."""
    rule: str
    """What decided: ``pattern '…'``, ``preset NAME``, ``tp_plan``, ``structure``."""
    why: str = ""
    """In words."""

    def spans(self, rank: int) -> tuple[tuple[Range, ...], ...]:
        """Return, per dimension, the ranges that a tensor rank holds."""
        found: list[tuple[Range, ...]] = [((0, size),) for size in self.shape]
        for cut in self.cuts:
            found[cut.dim] = cut.ranges[rank]
        return tuple(found)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what a tensor rank holds."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.spans(rank))

    def holders(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the tensor ranks that hold exactly what ``rank`` holds, itself included, in order."""
        mine = self.spans(rank)
        return tuple(other for other in range(ranks) if self.spans(other) == mine)


def chunks(size: int, ranks: int) -> list[Range]:
    """Cut ``size`` as ``torch.chunk`` does: parts of ceil(size / ranks), the last ones smaller or empty.

    https://docs.pytorch.org/docs/stable/generated/torch.chunk.html; 7 over 3 is 3, 3, 1.
    """
    each = -(-size // ranks)
    return [(min(rank * each, size), min((rank + 1) * each, size)) for rank in range(ranks)]
