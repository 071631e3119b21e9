"""Global gradient norm and non-finite check in one pass over this rank's shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from partool_kernels import finite_sum_squares
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over

Mode = Literal["auto", "native", "torch"]


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """What all ranks know about a step's gradients; the same on each."""

    norm: float
    finite: bool
    loss_sum: float
    """Sum of the ranks' losses; tensor ranks, which all have the same one, count as one."""


def check_gradients(shards: Sequence[torch.Tensor], loss_sum: torch.Tensor, ranks: Ranks, mode: Mode) -> GradientCheck:
    """Return the norm over all ranks, with every element counted once, and the sum of the ranks' losses.

    One all-reduce of three float64 over all ranks; replicas hold the same gradients and tensor ranks see the same loss,
    so these sums are divided by their number. ``shards`` leaves out what another pipeline or tensor rank counts.
    """
    squares, finite = _local_sums(shards, mode) if ranks.device.type == "cpu" else _device_sums(shards)
    packed = torch.stack([squares, (~finite).double(), loss_sum.detach().double()])
    total, nonfinite, loss = sum_over(packed, ranks.world).tolist()
    loss /= ranks.tp.size()
    # The sum of finite squares may overflow or a shard may hold an infinity: neither can be clipped.
    good = nonfinite == 0 and math.isfinite(total) and math.isfinite(loss)
    return GradientCheck(math.sqrt(total / ranks.replicas) if good else math.nan, good, loss)


def clip_factor(norm: float, limit: float) -> float:
    """Return what gradients of this norm are multiplied with so that it does not exceed ``limit``; 0 is no limit."""
    return limit / norm if limit > 0 and norm > limit else 1.0


def _local_sums(shards: Sequence[torch.Tensor], mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
    total, finite = 0.0, True
    for shard in shards:
        squares, good = finite_sum_squares(shard, mode)
        total += squares
        finite = finite and good
    return torch.tensor(total, dtype=torch.float64), torch.tensor(finite)


def _device_sums(shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if not shards:
        return _no_gradients()
    squares = torch.stack(torch._foreach_norm(list(shards))).double().square().sum()
    return squares, torch.isfinite(squares)


def _no_gradients() -> tuple[torch.Tensor, torch.Tensor]:
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.zeros((), dtype=torch.float64, device=device), torch.ones((), dtype=torch.bool, device=device)
