"""Global gradient norm and non-finite check in one pass over this rank's shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from partool_kernels.reductions import block_sums, total
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over
from partool_runtime.torch_internals import foreach

Mode = Literal["auto", "native", "torch"]


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Result of the check of a step's gradients, the same on all ranks."""

    norm: float
    finite: bool
    loss_sum: float
    """Sum of the ranks' losses; tensor ranks all have the same loss, so they count as one rank."""
    flags: tuple[float, ...] = ()
    """Sums of the ranks' flags."""


class LocalSums(NamedTuple):
    """Sums of a rank's gradients, without gradients that another pipeline or tensor rank counts."""

    squares: torch.Tensor
    """Sum of squares, a float64 scalar on the device of compute."""
    finite: torch.Tensor
    """Whether all gradients are finite, a bool scalar."""


def check_gradients(
    sums: LocalSums,
    loss_sum: torch.Tensor,
    ranks: Ranks,
    flags: Sequence[float | torch.Tensor] = (),
    *,
    copies: int | None = None,
    over: dist.ProcessGroup | None = None,
) -> GradientCheck:
    """Return the norm over all ranks, with every element counted once, and the sums of the ranks' losses and flags.

    One all-reduce adds three float64 and the flags over all ranks; the host waits for it once. Replicas hold equal
    gradients, so the sum of squares is divided by the number of replicas. Tensor ranks see equal losses, so the loss
    sum is divided by the number of tensor ranks. ``copies`` of 1 restricts all of this to the ranks ``over``, which
    together hold one copy; None is the group of one rank.
    """
    squares, finite = sums
    # Values are filled in on the device: a copy from the host would wait for all earlier work.
    flagged = [
        flag if isinstance(flag, torch.Tensor) else torch.full((), flag, dtype=torch.float64, device=squares.device)
        for flag in flags
    ]
    packed = torch.stack([squares, (~finite).double(), loss_sum.detach().double(), *flagged])
    total, nonfinite, loss, *flagged_sums = sum_over(packed, ranks.world if copies is None else over).tolist()
    loss /= ranks.tp.size
    # A sum of finite squares may overflow, or a shard may hold an infinity: clipping is impossible in both cases.
    good = nonfinite == 0 and math.isfinite(total) and math.isfinite(loss)
    norm = math.sqrt(total / (copies or ranks.replicate.size)) if good else math.nan
    return GradientCheck(norm, good, loss, tuple(flagged_sums))


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that scales gradients of norm ``norm`` to at most norm ``limit``; 0 means no limit."""
    return limit / norm if limit > 0 and norm > limit else 1.0


def local_sums(shards: Sequence[torch.Tensor], device: torch.device, mode: Mode) -> LocalSums:
    """Return the sums over a rank's shards of gradients, which are on ``device``."""
    if device.type != "cpu":
        return _device_sums(shards, device)
    blocks: list[float] = []
    finite = True
    for shard in shards:
        squares, good = block_sums(shard, mode)
        blocks += squares
        finite = finite and good
    return host_sums(blocks, finite, device)


def host_sums(blocks: Sequence[float], finite: bool, device: torch.device) -> LocalSums:
    """Return the rank's sums, given the sum of squares of each block; the bits do not depend on the blocks' order."""
    squares = torch.full((), total(blocks), dtype=torch.float64, device=device)
    return LocalSums(squares, torch.full((), finite, dtype=torch.bool, device=device))


def _device_sums(shards: Sequence[torch.Tensor], device: torch.device) -> LocalSums:
    if not shards:
        return host_sums((), True, device)
    squares = torch.stack(foreach.norm(list(shards))).double().square().sum()
    return LocalSums(squares, torch.isfinite(squares))
