"""Training: a workload with its batch, its optimizer and its objective."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from partool.layout.one_bit import ExchangeKind
from partool.plan.layout import OffloadLayout
from partool.spec.objective import ObjectiveSpec
from partool.spec.parallel import Offload
from partool.spec.training import Adapt
from partool.work.base import Workload
from partool.work.gathers import COALESCED, Controls

MASTER_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4, "fp8": 4}
"""Bytes of one element of master weights, moments and reduced gradients, by precision."""


@dataclass(frozen=True)
class MatrixUpdates:
    """Costs of an optimizer that updates matrices of layers as wholes (Muon); another one updates all else."""

    moments: int
    """Number of tensors that it keeps per parameter."""
    direction_bytes: int
    """Bytes of an element of a matrix that is sent and orthogonalised."""


@dataclass(frozen=True)
class OneBitUpdates:
    """Kinds of exchanges of a run."""

    steps: tuple[tuple[ExchangeKind, int], ...]
    """Number of steps of each kind."""
    local: bool
    """Whether a rank keeps the moves since the last exchange, and the weights there."""

    @property
    def total(self) -> int:
        """Number of steps."""
        return sum(count for _, count in self.steps)

    def share(self, kind: ExchangeKind) -> float:
        """Return the share of the steps that are of a kind."""
        return dict(self.steps)[kind] / self.total


@dataclass(frozen=True, kw_only=True)
class TrainingWork(Workload):
    """Training of a model, shared by all layouts of one search."""

    global_batch: int
    """Sequences per optimizer step, over all ranks."""
    recompute: tuple[str, ...] | None = None
    """Recompute policy of each layer, if the spec lists policies by layer."""
    controls: Controls = COALESCED
    """Settings of the all-gathers of sharded parameters."""
    moments: int = 2
    """Number of tensors that the optimizer keeps per parameter, each of the parameter's size; of an optimizer that
    updates only matrices as wholes, those of the other parameters."""
    matrices: MatrixUpdates | None = None
    """None if the optimizer updates no matrices as wholes."""
    averages: bool = False
    """Whether a moving average of the trained weights is kept beside the moments, in the type of master weights."""
    one_bit: OneBitUpdates | None = None
    """None if data-parallel ranks average gradients in every step."""
    adapt: Adapt | None = None
    """Parameters whose steps the optimizer scales by norms of whole parameters (LAMB); None if it scales none so."""
    perturbed: float = 0.0
    """Share of the steps whose micro-batches run once more before, to find perturbations of embeddings."""
    reference_passes: int = 0
    """Forward passes of a reference over each micro-batch, before the passes of the training."""
    reference_copy: bool = False
    """Whether a frozen copy of the model computes them."""
    teacher: TrainingWork | None = None
    """Forward passes of a teacher over the same micro-batches (``partool.work.distillation``); None without one."""
    taught: float = 0.0
    """Share of the steps that have the teacher."""
    offload: Offload | OffloadLayout = field(default_factory=Offload)
    """Settings of offloading and of the optimizer's update on the host, taken from a spec or from a layout."""

    def with_objective(self, objective: ObjectiveSpec) -> TrainingWork:
        """Return the work with the passes and the memory of the objective's reference."""
        passes, copy = int(objective.refers_in_steps), objective.has_reference and objective.reference == "copy"
        return replace(self, reference_passes=passes, reference_copy=copy)

    @property
    def average_bytes(self) -> int:
        """Bytes of the moving average of one trained parameter; 0 without one."""
        return self.master_bytes * self.averages

    @property
    def master_bytes(self) -> int:
        """Bytes of one element of master weights."""
        return MASTER_BYTES[self.precision]
