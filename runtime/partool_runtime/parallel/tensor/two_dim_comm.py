"""Starts collectives over the axes of two-dimensional tensor parallelism, and returns functions that wait for them."""

from __future__ import annotations

from collections.abc import Callable
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
