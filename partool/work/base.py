"""What runs, whatever it runs for: the model, its machines and code base, and the length and type of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from partool.layout.parameters import is_frozen
from partool.layout.quantised import FewBits
from partool.schedule import Schedule
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.spec.training import Precision
from partool.work.stack import Stack
from partool.work.stacks import PARTOOL
from partool.work.traced import Trace, shipped

COMPUTE_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of one element of activations and of weights in the compute type, by precision. With fp8, elements have 2 bytes
and are cast to fp8 only for matrix products."""
IMBALANCE = 1.1
"""Default of ``limits.expert_imbalance``: 1.0 to 1.3 with trained or forced balancing."""

AnyWorkload = TypeVar("AnyWorkload", bound="Workload")


@dataclass(frozen=True)
class Workload:
    """What all layouts of one search have in common, and what every kind of job has.

    Functions that price layers, products, attention and exchanges of activations take a workload. Those that price a
    job's steps and its state take the class of that job, such as :class:`partool.work.training.TrainingWork`.
    """

    model: ModelConfig
    devices: Devices
    sequence_length: int
    precision: Precision
    stack: Stack = PARTOOL
    """Facts about the code base that runs the plan: how it keeps states, and which operators it fuses and overlaps."""
    trace: Trace = field(default_factory=shipped)
    """Bytes that the code base's blocks save for the backward pass."""
    backward: bool = True
    """False for a job that computes no gradients; its passes only go forward and save nothing."""
    frozen: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""
    padded_vocab: int | None = None
    """Number of embedding rows after padding by the code base; None means the model's number of rows."""
    time_scalar: float = 1.0
    """Ratio of measured to predicted step time on this machine, from its finished runs."""
    memory_scalar: float = 1.0
    """Ratio of measured to predicted memory; each term is multiplied by this ratio, so terms still sum to the total."""
    memory_runs: int = 0
    """Number of measured runs from which ``memory_scalar`` was computed."""
    memory_spread: float = 0.0
    """Relative standard deviation of the measured ratios from which ``memory_scalar`` was computed."""
    lists: Schedule | None = None
    """The user's schedule, for layouts whose schedule is ``file``."""
    stage_layers: tuple[int, ...] | None = None
    """Number of layers of each pipeline stage; None means the most even split."""
    expandable_segments: bool | None = None
    """True if the allocator of an accelerator has expandable segments; None if that is not known."""
    expert_imbalance: float = IMBALANCE
    """Tokens of the busiest rank's experts relative to the mean over ranks."""
    expert_rank_capacity: float | None = None
    """Rows of padded exchanges relative to an even share of the choices; None: as many as there can be."""
    shared_elements: int = 0
    """Elements of parameters that several layers have in common. They are gathered with the head, for the whole of both
    passes; layers are priced with equal parts of them."""
    memo: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Prices of this workload that repeat (:mod:`partool.cost.repeats`), by the name of what is priced."""

    def of_shape(self: AnyWorkload, shape: int) -> AnyWorkload:
        """Return the same work for the model whose layers of experts all have one shape of this model's experts.

        ``shape`` is a place in :attr:`ModelConfig.expert_shapes`; a model whose experts are alike has only itself.
        """
        if self.model.moe is None or self.model.moe.layers is None:
            return self
        key = f"shape {shape}"
        if key not in self.memo:
            self.memo[key] = replace(self, model=self.model.expert_shapes[shape])
        of_shape: AnyWorkload = self.memo[key]
        return of_shape

    @property
    def trains_head(self) -> bool:
        """Whether the head's matrix has a gradient."""
        return not is_frozen("embed.weight" if self.model.tied_embeddings else "head.weight", self.frozen)

    @property
    def load(self) -> float:
        """Tokens of the busiest rank's experts relative to the mean over ranks, as the model's router allows."""
        moe = self.model.moe
        if moe is None or moe.routing == "balanced":
            return 1.0
        return self.expert_imbalance if moe.capacity is None else min(self.expert_imbalance, moe.capacity)

    @cached_property
    def few_bits(self) -> FewBits | None:
        """Which frozen matrices are stored in few bits; None if none are."""
        adapter = self.model.adapter
        if adapter is None or adapter.base == "bf16" or not self.frozen:
            return None
        return FewBits(adapter, tuple(self.frozen), self.compute_bytes)

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element."""
        return COMPUTE_BYTES[self.precision]

    @cached_property
    def domain(self) -> int:
        """Number of ranks connected by the fast link."""
        return self.devices.joined
