"""The axes of two-dimensional tensor parallelism: starts collectives, and returns functions that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from partool_runtime.torch_internals.collectives import finished, start_gather, start_scatter_sum, start_sum

Pending = Callable[[], torch.Tensor]
"""Function that waits for a collective and returns its result."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the tensor ranks."""

    group_name: str
    """Name of the process group; empty for one rank."""
    size: int
    place: int
    """Place of this rank on the axis."""

    def start_sum(self, x: torch.Tensor, *, in_place: bool = False) -> Pending:
        """Start to sum a tensor over the axis; all ranks get the sum, in a new tensor unless ``in_place``."""
        if self.size == 1:
            return lambda: x
        return partial(finished, start_sum(x.contiguous(), self.group_name, in_place=in_place))

    def start_scatter(self, x_Rx: torch.Tensor) -> Pending:
        """Start to sum ``[R, …]`` over the axis; rank r gets index r of the sum's first dimension."""
        if self.size == 1:
            return lambda: x_Rx[0]
        return partial(_shaped, start_scatter_sum(x_Rx, self.size, self.group_name), x_Rx.shape[1:])

    def start_gather(self, x: torch.Tensor) -> Pending:
        """Start to all-gather the tensors of the axis's R ranks into one tensor ``[R, …]``."""
        if self.size == 1:
            return lambda: x[None]
        return partial(_shaped, start_gather(x, self.size, self.group_name), (self.size, *x.shape))


def _shaped(started: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return finished(started).view(shape)


@dataclass(frozen=True, slots=True)
class Grid:
    """The tensor ranks, and the settings of their communication."""

    outer: Axis
    """Axis of d1 ranks."""
    inner: Axis
    """Axis of d2 ranks, with the fastest links."""
    chunks: int = 1
    """Number of pieces of the tokens."""
    overlap: bool = False
    """Whether gradients of weights are computed while the gradient of the input is in flight."""


def side_by_side(parts_TX: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts joined along their widths; a single part itself."""
    return torch.cat(list(parts_TX), dim=-1) if len(parts_TX) > 1 else parts_TX[0]


def by_rank(parts_TX: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
    """Return ``[R, T, X/R]``; entry r is the concatenation of rank r's widths of all parts."""
    return torch.cat([part_TX.view(len(part_TX), ranks, -1).movedim(1, 0) for part_TX in parts_TX], dim=-1)


def of_ranks(x_RTX: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return one tensor ``[T, R · width]`` per part; this is the reverse of :func:`by_rank`."""
    return tuple(part_RTX.movedim(0, 1).flatten(1) for part_RTX in torch.split(x_RTX, list(widths), dim=-1))
