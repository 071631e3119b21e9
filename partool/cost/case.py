"""Layouts whose fields are columns of numbers.

A column is one number or a numpy array with an entry per layout. Each equation is written once, with numpy's functions,
so that the same code prices one layout or a hundred thousand layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.strategies import schedules, sequence
from partool.strategies.schedules import ScheduleRecord

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

EXCHANGES = ("direct", "node_first", "node_first_summed", "padded")
"""Ways of tokens to their experts; ``Layouts.expert_exchange`` is an index into them."""
DIRECT, NODE_FIRST, NODE_FIRST_SUMMED, PADDED = range(len(EXCHANGES))
BY_NODE = NODE_FIRST, NODE_FIRST_SUMMED
"""Exchanges by which tokens cross to each node once."""
OVERLAPS = ("none", "backward", "symmetric")
"""Ways to overlap tensor parallelism's collectives; ``Layouts.tensor_overlap`` is an index into them."""


def among(column: Column, values: tuple[int, ...]) -> Mask:
    """Return True where a column has one of ``values``; faster than ``numpy.isin``, which sorts."""
    matches: Mask = np.asarray(column) == values[0]
    for value in values[1:]:
        matches = matches | (column == value)
    return matches


def at_rows(column: Column, rows: Any) -> Column:
    """Return a column at the indices ``rows``; a single number, which all rows have, stays one."""
    return column[rows] if isinstance(column, np.ndarray) and column.ndim else column


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
    expert_exchange: Column = 0
    """Index in :data:`EXCHANGES`; 0 where ``ep`` is 1."""
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
        shapes = {value.shape for value in self.__dict__.values() if isinstance(value, np.ndarray)} - {()}
        return np.broadcast_shapes(*shapes) if len(shapes) > 1 else next(iter(shapes), ())

    def take(self, index: Any) -> Layouts:
        """Return the layouts at an index or mask; columns that are single numbers are kept unchanged."""
        if np.asarray(index).dtype.kind == "b":
            index = np.flatnonzero(index)  # counted once for all columns
        return _of({name: at_rows(value, index) for name, value in self.__dict__.items()})

    def with_columns(self, **columns: Column) -> Layouts:
        """Return the same layouts with some columns replaced; ten times as fast as :func:`dataclasses.replace`.

        Raises ``TypeError`` for a name that is no column.
        """
        if not columns.keys() <= self.__dict__.keys():
            raise TypeError(f"no columns of layouts: {', '.join(sorted(columns.keys() - self.__dict__.keys()))}")
        return _of({**self.__dict__, **columns})


def _of(columns: dict[str, Any]) -> Layouts:
    """Return layouts from all their columns by name.

    A frozen dataclass sets its fields one by one; searches make layouts so often that this takes a share of their time.
    """
    layouts = object.__new__(Layouts)
    layouts.__dict__.update(columns)
    return layouts
