"""What every cost function reads: a job, and layouts as columns of numbers.

A column is one number or a numpy array with an entry per layout. Each equation is written once, with numpy's functions,
and prices one layout or a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.stacks import PARTOOL, Stack
from partool.cost.traffic.gathers import COALESCED, Controls
from partool.plan.layout import OffloadLayout
from partool.schedule import Schedule
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.spec.parallel import Offload
from partool.spec.training import Precision
from partool.strategies import schedules, sequence
from partool.strategies.schedules import ScheduleRecord

Column = NDArray[np.float64] | float
"""A number, or a numpy array with one entry per layout; whole numbers too."""
Mask = NDArray[np.bool_] | bool
"""Whether something holds, of one layout or of each."""

RECOMPUTE = ("none", "attention", "selective", "keep_attention", "full")
"""Values of ``Layouts.recompute`` by index, in the order of what they keep: nothing is computed again, the core of
attention is, all but matrix products and attention, all but attention, whole layers."""
ATTENTION, SELECTIVE, KEEP_ATTENTION, FULL = range(1, len(RECOMPUTE))
SEQUENCE_METHODS = tuple(sequence.METHODS)
"""Values of ``Layouts.sequence_method`` by index."""
ORDERS = ("contiguous", "zigzag", "grid")
"""Values of ``Layouts.sequence_order`` by index."""
ZIGZAG = ORDERS.index("zigzag")
INSIDES = ("teams", "rings")
"""Values of ``Layouts.sequence_inside`` by index."""
SCHEDULES = (*schedules.SCHEDULES, "file")
"""Values of ``Layouts.schedule`` by index; names of schedules, and the user's own."""


def _where(applies: Callable[[ScheduleRecord], bool]) -> tuple[int, ...]:
    return tuple(index for index, record in enumerate(schedules.SCHEDULES.values()) if applies(record))


FOLDED = _where(lambda record: record.folded)
"""Those whose stages go to and fro over the ranks; of the others, stage s is on rank s modulo the ranks."""
RING = _where(lambda record: record.moves == "weights")
"""Those that move weights round the ranks; each micro-batch stays on one of them (Lin et al., PPoPP'25)."""
EAGER = _where(lambda record: record.eager)
"""Those whose blocks cannot be compiled."""
HALVED = _where(lambda record: record.split)
"""Those whose backward passes come in two halves."""
HALVED_RING = tuple(index for index in RING if index in HALVED)
ONE_AT_THE_END = _where(lambda record: record.one_at_the_end)
"""Those whose last stage holds one micro-batch at a time."""

OVERLAPS = ("none", "backward", "symmetric")
"""Values of ``Layouts.tensor_overlap`` by index."""

COMPUTE_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of one element of activations and of the parameters they are computed with (fp8 casts as it multiplies)."""
MASTER_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4, "fp8": 4}
"""Bytes of one element of master weights, moments and reduced gradients."""


def among(column: Column, values: tuple[int, ...]) -> Mask:
    """Return where a column has one of a few values; ``numpy.isin`` sorts for that."""
    found: Mask = np.asarray(column) == values[0]
    for value in values[1:]:
        found = found | (column == value)
    return found


@dataclass(frozen=True)
class TrainingJob:
    """The training that all layouts of one search are for."""

    model: ModelConfig
    devices: Devices
    sequence_length: int
    global_batch: int
    """Sequences per optimizer step, over all ranks."""
    precision: Precision
    stack: Stack = PARTOOL
    """The code base that runs the plan: how it keeps states, what it fuses and overlaps."""
    frozen: tuple[str, ...] = ()
    padded_vocab: int | None = None
    """Rows of the embedding where a code base pads it; None: the model's."""
    time_scalar: float = 1.0
    """Measured over predicted step time on this machine, from its finished runs."""
    memory_scalar: float = 1.0
    """The same for memory: every term is multiplied, so that terms still sum to the total."""
    memory_runs: int = 0
    """Runs behind ``memory_scalar``."""
    memory_spread: float = 0.0
    """Their relative standard deviation."""
    lists: Schedule | None = None
    """The user's own schedule, of layouts whose schedule is ``file``."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage where they are given; None: as balances best."""
    controls: Controls = COALESCED
    """How ranks that share parameters bring them together."""
    moments: int = 2
    """Tensors of a parameter's size that the optimizer keeps beside it."""
    offload: Offload | OffloadLayout = field(default_factory=Offload)
    """How what leaves the device is kept and updated: as a spec asks, or as a layout says."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element."""
        return COMPUTE_BYTES[self.precision]

    @property
    def master_bytes(self) -> int:
        """Bytes of one master element."""
        return MASTER_BYTES[self.precision]

    @cached_property
    def domain(self) -> int:
        """Ranks that the fast link joins."""
        return self.devices.domain or self.devices.per_node


@dataclass(frozen=True)
class Layouts:
    """Layouts as columns. ``pp * replicas * shards * cp * tp`` ranks; ``micro_batch * accumulation * dp`` sequences."""

    pp: Column = 1
    replicas: Column = 1
    """dp_replicate: copies of the sharded state."""
    shards: Column = 1
    """dp_shard: ranks that share one copy; with zero 0 always 1."""
    cp: Column = 1
    tp: Column = 1
    ep: Column = 1
    """Ranks that share the experts: a view of ``dp * cp`` ranks (and of ``tp`` with ``expert_tensor``)."""
    zero: Column = 0
    micro_batch: Column = 1
    accumulation: Column = 1
    """Micro-batches per rank and step (m)."""
    recompute: Column = 0
    """Index in :data:`RECOMPUTE`."""
    recompute_share: Column = 1.0
    """Share of the layers under that policy; the others recompute nothing."""
    schedule: Column = 1
    """Index in :data:`SCHEDULES`."""
    chunks: Column = 1
    """Stages per pipeline rank (v)."""
    in_flight: Column = 0
    """Most micro-batches that the schedule may hold on a rank; 0: as many as it wants."""
    sequence_method: Column = 0
    """Index in :data:`SEQUENCE_METHODS`."""
    sequence_order: Column = 0
    """Index in :data:`ORDERS`: which tokens a sequence-parallel rank holds."""
    sequence_inner: Column = 1
    """With ``usp``: neighbouring ranks that trade sequence for heads; ``cp / sequence_inner`` form the ring."""
    sequence_teams: Column = 1
    """With ``startrail``: ranks of a team (C), whose square divides ``cp``."""
    sequence_inside: Column = 0
    """Index in :data:`INSIDES`: which of both neighbouring ranks form."""
    mlp_tile_tokens: Column = 0
    """Tokens of a sequence that pass a feed-forward network at once; 0: all."""
    loss_tile_tokens: Column = 0
    """Tokens whose logits exist at once; 0: as many as the runtime's own limit allows."""
    gpu_fraction: Column = 1.0
    """Share of the optimizer state that stays on the device; 1: none of it leaves."""
    offload_parameters: Column = 0
    """1 where parameter shards live in host memory or files."""
    offload_activations: Column = 0
    """1 where saved activations go to host memory."""
    compiled: Column = 1
    """1 where blocks are compiled."""
    tensor_inner: Column = 1
    """d2 of the d1 × d2 tensor ranks; 1 where they lie on one axis."""
    sequence_norms: Column = 0
    """1 where norms and residuals work on a share of the sequence per tensor rank."""
    tensor_overlap: Column = 0
    """Index in :data:`OVERLAPS`."""
    tensor_chunks: Column = 1
    """Pieces of a micro-batch whose sums travel while the next is multiplied."""

    @property
    def folded(self) -> Mask:
        """True where stages go to and fro over the ranks."""
        return among(self.schedule, FOLDED)

    @property
    def ring(self) -> Mask:
        """True where weights travel instead of activations."""
        return among(self.schedule, RING) & (self.pp > 1)

    @property
    def dp(self) -> Column:
        """Data-parallel ranks."""
        return self.replicas * self.shards

    @property
    def world(self) -> Column:
        """Ranks of the mesh."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the columns together; () where all are single numbers."""
        return np.broadcast_shapes(*(np.shape(getattr(self, one.name)) for one in fields(self)))

    def take(self, index: Any) -> Layouts:
        """Return the layouts at an index or mask; columns that are single numbers stay."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return Layouts(**{name: value[index] if hasattr(value, "shape") else value for name, value in values.items()})
