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
"""Names of the moments that each optimizer keeps for every element; checkpoints use the same names."""


class HostKernelError(ValueError):
    """A pass cannot take the arguments; raised before the pass reads or writes any memory."""


@dataclass(frozen=True, slots=True)
class StepRule:
    """Hyperparameters of one step for one group of parameters.

    ``adamw``: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2. ``lion``: Chen et al., arXiv 2302.06675.
    ``adagrad``: Duchi et al., JMLR 12 (2011). ``sgd``: as in torch, with momentum ``beta1`` and without dampening.
    Weight decay is decoupled in all four.
    """

    kind: str
    """Name of the optimizer; for passes on the host it has to be in :data:`MOMENTS`."""
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of the step, counted from 1."""
    scale: float = 1.0
    """Factor that multiplies the gradients before the update."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's shard of a parameter or of a bucket: contiguous tensors of the same size in host memory."""

    master: torch.Tensor
    """Weights of the shard, float32 or float64."""
    moments: tuple[torch.Tensor, ...]
    """Moments that :data:`MOMENTS` names, in the master's type or in bfloat16."""
    group: int = 0
    """Index of this part's rule in the rules of an :class:`UpdatePass`."""


@dataclass(frozen=True, slots=True)
class UpdatePass:
    """Gradients of all parts, in the order of the parts, and the rules of all groups."""

    gradients: Sequence[torch.Tensor]
    """Contiguous tensors, one per part, in float32, float64, bfloat16 or float16."""
    rules: Sequence[StepRule]


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over each part's gradients, which are not yet multiplied by the rule's scale."""

    squares: tuple[tuple[float, ...], ...]
    """For each part, one float64 sum per block of 65,536 elements; every implementation gives the same sums. If
    parameters are cut at block boundaries, ``math.fsum`` over all sums gives the same bits for every cut."""
    finite: tuple[bool, ...]
