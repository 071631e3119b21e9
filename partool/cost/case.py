"""Inputs of every cost function: a training job, and layouts whose fields are columns of numbers.

A column is one number or a numpy array with an entry per layout. Each equation is written once, with numpy's functions,
so that the same code prices one layout or a hundred thousand layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.traffic.gathers import COALESCED, Controls
from partool.layout.one_bit import ExchangeKind
from partool.plan.layout import OffloadLayout
from partool.schedule import Schedule
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.spec.parallel import Offload
from partool.spec.training import Adapt, Precision
from partool.strategies import schedules, sequence
from partool.strategies.schedules import ScheduleRecord
from partool.work.stacks import PARTOOL, Stack

Column = NDArray[np.float64] | float
"""A number (also an integer), or a numpy array with one entry per layout."""
Mask = NDArray[np.bool_] | bool
"""True where a condition holds: one value, or a numpy array with one value per layout."""

RECOMPUTE = ("none", "attention", "selective", "keep_attention", "full")
"""Recompute policies; ``Layouts.recompute`` is an index into them. In this order they recompute nothing, the core of
attention, all but matrix products and attention, all but attention, and whole layers."""
ATTENTION, SELECTIVE, KEEP_ATTENTION, FULL = range(1, len(RECOMPUTE))
SEQUENCE_METHODS = tuple(sequence.METHODS)
"""Methods of sequence parallelism; ``Layouts.sequence_method`` is an index into them."""
ORDERS = ("contiguous", "zigzag", "grid")
"""Orders in which ranks get a sequence's tokens; ``Layouts.sequence_order`` is an index into them."""
ZIGZAG = ORDERS.index("zigzag")
INSIDES = ("teams", "rings")
"""Groups that neighbouring ranks of ``startrail`` form; ``Layouts.sequence_inside`` is an index into them."""
SCHEDULES = (*schedules.SCHEDULES, "file")
"""Names of schedules, and ``file`` for the user's schedule; ``Layouts.schedule`` is an index into them."""


def _where(applies: Callable[[ScheduleRecord], bool]) -> tuple[int, ...]:
    return tuple(index for index, record in enumerate(schedules.SCHEDULES.values()) if applies(record))


FOLDED = _where(lambda record: record.folded)
"""Indices of schedules whose stages run back and forth over the ranks; in all other schedules, stage s is on rank s
modulo the number of ranks."""
RING = _where(lambda record: record.moves == "weights")
"""Indices of schedules that pass weights around ranks; each micro-batch stays on one rank (Lin et al., PPoPP'25)."""
EAGER = _where(lambda record: record.eager)
"""Indices of schedules whose blocks cannot be compiled."""
HALVED = _where(lambda record: record.split)
"""Indices of schedules that split backward passes: first the gradients of inputs, later those of weights."""
CAPPED = _where(lambda record: record.capped)
"""Indices of schedules whose action lists a search finds."""
HALVED_RING = tuple(index for index in RING if index in HALVED)
ONE_AT_THE_END = _where(lambda record: record.one_at_the_end)
"""Indices of schedules whose last stage holds one micro-batch at a time."""

OVERLAPS = ("none", "backward", "symmetric")
"""Ways to overlap tensor parallelism's collectives; ``Layouts.tensor_overlap`` is an index into them."""

COMPUTE_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of one element of activations and of weights in the compute type, by precision. With fp8, elements have 2 bytes
and are cast to fp8 only for matrix products."""
MASTER_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4, "fp8": 4}
"""Bytes of one element of master weights, moments and reduced gradients, by precision."""


def among(column: Column, values: tuple[int, ...]) -> Mask:
    """Return True where a column has one of ``values``; faster than ``numpy.isin``, which sorts."""
    found: Mask = np.asarray(column) == values[0]
    for value in values[1:]:
        found = found | (column == value)
    return found


IMBALANCE = 1.1
"""Default of ``limits.expert_imbalance``: 1.0 to 1.3 with trained or forced balancing."""


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


@dataclass(frozen=True)
class TrainingJob:
    """Training job, shared by all layouts of one search."""

    model: ModelConfig
    devices: Devices
    sequence_length: int
    global_batch: int
    """Sequences per optimizer step, over all ranks."""
    precision: Precision
    stack: Stack = PARTOOL
    """Facts about the code base that runs the plan: how it keeps states, and which operators it fuses and overlaps."""
    frozen: tuple[str, ...] = ()
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
    recompute: tuple[str, ...] | None = None
    """Recompute policy of each layer, if the spec lists policies by layer."""
    usable_bytes: int | None = None
    """Bytes of a device's memory that a layout may use; None means all of its memory."""
    expandable_segments: bool | None = None
    """True if the allocator of an accelerator has expandable segments; None if that is not known."""
    controls: Controls = COALESCED
    """Settings of the all-gathers of sharded parameters."""
    expert_imbalance: float = IMBALANCE
    """Tokens of the busiest rank's experts relative to the mean over ranks."""
    moments: int = 2
    """Number of tensors that the optimizer keeps per parameter, each of the parameter's size; of an optimizer that
    updates only matrices as wholes, those of the other parameters."""
    matrices: MatrixUpdates | None = None
    """None if the optimizer updates no matrices as wholes."""
    one_bit: OneBitUpdates | None = None
    """None if data-parallel ranks average gradients in every step."""
    adapt: Adapt | None = None
    """Parameters whose steps the optimizer scales by norms of whole parameters (LAMB); None if it scales none so."""
    shared_elements: int = 0
    """Elements of parameters that several layers have in common. They are gathered with the head, for the whole of both
    passes; layers are priced with equal parts of them."""
    perturbed: float = 0.0
    """Share of the steps whose micro-batches run once more before, to find perturbations of embeddings."""
    offload: Offload | OffloadLayout = field(default_factory=Offload)
    """Settings of offloading and of the optimizer's update on the host, taken from a spec or from a layout."""
    memo: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Prices of this job that repeat (:mod:`partool.cost.repeats`), by the name of what is priced."""

    @property
    def load(self) -> float:
        """Tokens of the busiest rank's experts relative to the mean over ranks, as the model's router allows."""
        moe = self.model.moe
        if moe is None or moe.routing == "balanced":
            return 1.0
        return self.expert_imbalance if moe.capacity is None else min(self.expert_imbalance, moe.capacity)

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element."""
        return COMPUTE_BYTES[self.precision]

    @property
    def master_bytes(self) -> int:
        """Bytes of one element of master weights."""
        return MASTER_BYTES[self.precision]

    @cached_property
    def domain(self) -> int:
        """Number of ranks connected by the fast link."""
        return self.devices.domain or self.devices.per_node


@dataclass(frozen=True)
class Layouts:
    """One or many layouts; each field is a number, or a numpy array with one entry per layout.

    A layout has ``pp * replicas * shards * cp * tp`` ranks, and ``micro_batch * accumulation * dp`` sequences per step.
    """

    pp: Column = 1
    replicas: Column = 1
    """Number of copies of the sharded state (``dp_replicate``)."""
    shards: Column = 1
    """Number of ranks that share one copy of the state (``dp_shard``); always 1 with ZeRO-0."""
    cp: Column = 1
    tp: Column = 1
    ep: Column = 1
    """Number of ranks among which experts are divided; ``ep * etp`` divides ``shards * cp * tp``."""
    etp: Column = 1
    """Number of ranks that hold parts of the same experts; 1 where ``ep`` is 1."""
    zero: Column = 0
    micro_batch: Column = 1
    accumulation: Column = 1
    """Number of micro-batches per rank and step (m)."""
    recompute: Column = 0
    """Index in :data:`RECOMPUTE`."""
    recompute_share: Column = 1.0
    """Share of the layers under the recompute policy; the others recompute nothing."""
    schedule: Column = 1
    """Index in :data:`SCHEDULES`."""
    chunks: Column = 1
    """Number of stages per pipeline rank (v)."""
    in_flight: Column = 0
    """Maximum number of micro-batches in flight on a rank; 0 means that only the schedule limits this number."""
    sequence_method: Column = 0
    """Index in :data:`SEQUENCE_METHODS`."""
    sequence_order: Column = 0
    """Index in :data:`ORDERS`; the order decides which tokens a sequence-parallel rank holds."""
    sequence_inner: Column = 1
    """With ``usp``, number of neighbouring ranks in a group that exchanges tokens for heads; a ring has
    ``cp / sequence_inner`` ranks."""
    sequence_teams: Column = 1
    """With ``startrail``, number of ranks in a team (C); the square of this number divides ``cp``."""
    sequence_inside: Column = 0
    """Index in :data:`INSIDES`; the value says whether neighbouring ranks form teams or rings."""
    mlp_tile_tokens: Column = 0
    """Number of tokens of a sequence that go through a feed-forward network at once; 0 means all."""
    loss_tile_tokens: Column = 0
    """Number of tokens whose logits exist at once; 0 means as many as the runtime's limit allows."""
    gpu_fraction: Column = 1.0
    """Share of the optimizer state that stays on the device; 1 keeps all of it."""
    offload_parameters: Column = 0
    """1 where parameter shards are kept in host memory or files."""
    offload_activations: Column = 0
    """1 where saved activations are offloaded to host memory."""
    compiled: Column = 1
    """1 where blocks are compiled."""
    tensor_inner: Column = 1
    """Inner size d2 of the d1 × d2 tensor ranks; 1 if tensor parallelism has one dimension."""
    sequence_norms: Column = 0
    """1 where norms and residuals are sharded along the sequence over tensor ranks."""
    tensor_overlap: Column = 0
    """Index in :data:`OVERLAPS`."""
    tensor_chunks: Column = 1
    """Number of pieces of a micro-batch; results of one piece are summed over ranks while the next piece is
    multiplied."""

    @property
    def folded(self) -> Mask:
        """True where stages run back and forth over the ranks."""
        return among(self.schedule, FOLDED)

    @property
    def ring(self) -> Mask:
        """True where ranks send weights around a ring instead of activations."""
        return among(self.schedule, RING) & (self.pp > 1)

    @property
    def expert_ranks(self) -> Column:
        """Number of ranks that together hold a layer's experts, and exchange their tokens; 1 without such a group."""
        return self.ep * self.etp

    @property
    def dp(self) -> Column:
        """Number of data-parallel ranks."""
        return self.replicas * self.shards

    @property
    def world(self) -> Column:
        """Number of ranks of the mesh."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of all columns; () where all are single numbers."""
        shapes = {getattr(value, "shape", ()) for value in self.__dict__.values()} - {()}
        return np.broadcast_shapes(*shapes) if len(shapes) > 1 else next(iter(shapes), ())

    def take(self, index: Any) -> Layouts:
        """Return the layouts at an index or mask; columns that are single numbers are kept unchanged."""
        values = self.__dict__
        if np.asarray(index).dtype.kind == "b":
            index = np.flatnonzero(index)  # counted once for all columns
        return Layouts(**{name: value[index] if getattr(value, "ndim", 0) else value for name, value in values.items()})
