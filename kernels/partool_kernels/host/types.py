"""Arguments and results of optimizer passes on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Mode = Literal["auto", "native", "torch"]
"""``native`` requires the compiled library; ``torch`` never uses it; ``auto`` uses it where it is present."""
MOMENTS: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
    "sgd": ("momentum",),
}
"""State that each optimizer keeps per element in addition to the weight, by the names used in checkpoints."""


class HostKernelError(ValueError):
    """Arguments that a pass cannot take, found before memory is touched."""


@dataclass(frozen=True, slots=True)
class StepRule:
    """Hyperparameters of one step for one group of parameters.

    ``adamw``: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2. ``lion``: Chen et al., arXiv 2302.06675.
    ``adagrad``: Duchi et al., JMLR 12 (2011). ``sgd``: as in torch, with momentum ``beta1`` and without dampening.
    Weight decay is decoupled in all of them.
    """

    kind: str
    """One of :data:`MOMENTS` for passes on the host."""
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of the step, counted from 1."""
    scale: float = 1.0
    """Factor that gradients are multiplied with first."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's shard of a parameter or of a bucket: contiguous tensors of the same size in host memory."""

    master: torch.Tensor
    """float32 or float64."""
    moments: tuple[torch.Tensor, ...]
    """Moments that :data:`MOMENTS` names, in the master's type or in bfloat16."""
    group: int = 0
    """Index of the rule for this part."""


@dataclass(frozen=True, slots=True)
class UpdatePass:
    """Gradients of all parts, in their order, and the rules of all groups."""

    gradients: Sequence[torch.Tensor]
    """float32, float64, bfloat16 or float16, contiguous."""
    rules: Sequence[StepRule]


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over each part's gradients, before they are scaled."""

    squares: tuple[tuple[float, ...], ...]
    """One float64 sum per block of 65,536 elements of the part, the same in every implementation. ``math.fsum`` over
    all of them gives the same bits for every cut of parameters at block boundaries."""
    finite: tuple[bool, ...]
