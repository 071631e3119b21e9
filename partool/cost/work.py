"""What every cost function reads: the model, the layout, the training settings and the machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from partool.layout.parameters import ParameterInfo, count, groups, is_frozen, parameters
from partool.plan.types import Layout
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.spec.training import Precision, TrainingSpec

MASTER_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4}
"""Bytes of one element of master weights, moments and reduced gradients."""
COMPUTE_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element of activations and of the parameters they are computed with."""


@dataclass(frozen=True)
class Work:
    """One layout of one training job on one kind of machine."""

    model: ModelConfig
    layout: Layout
    training: TrainingSpec
    devices: Devices
    frozen: tuple[str, ...] = ()

    @property
    def master_bytes(self) -> int:
        """Bytes of one master element."""
        return MASTER_BYTES[self.training.precision]

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element."""
        return COMPUTE_BYTES[self.training.precision]

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens that one rank works on in one forward pass."""
        return self.layout.micro_batch * self.training.sequence_length // self.layout.mesh.cp

    @cached_property
    def gathered_groups(self) -> list[int]:
        """Elements of each group of parameters that is gathered at once, on one rank of the fullest stage."""
        return list(_group_elements(self.model, self.layout.mesh.tp, self.layout.expert))

    @cached_property
    def stage_elements(self) -> int:
        """Elements of the parameters of the fullest pipeline stage, on one rank before ZeRO."""
        first, *layers, last = self.gathered_groups
        stages = self.layout.stages
        sums = [sum(layers[start:stop]) for start, stop in stages]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    @cached_property
    def trained_share(self) -> float:
        """Share of the parameters' elements that is trained."""
        return _trained_share(self.model, self.frozen)


# Planning prices hundreds of layouts of one model, whose parameters are a list of hundreds.
@lru_cache(maxsize=64)
def _group_elements(model: ModelConfig, tensor: int, expert: int) -> tuple[int, ...]:
    return tuple(_on_rank(group, tensor, expert) for group in groups(model))


@lru_cache(maxsize=8)
def _trained_share(model: ModelConfig, frozen: tuple[str, ...]) -> float:
    infos = parameters(model)
    return 1.0 - count(info for info in infos if is_frozen(info.name, frozen)) / count(infos)


def _on_rank(infos: Iterable[ParameterInfo], tensor: int, expert: int) -> int:
    """Return the elements one rank computes with: matrices are cut by tensor and expert parallelism."""
    total = 0
    for info in infos:
        elements = info.elements // expert if info.kind == "expert" else info.elements
        total += elements if info.kind == "norm" else elements // tensor
    return total
