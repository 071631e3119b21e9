"""Parts of the price of a method of sequence parallelism, and the arguments of its functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from partool.cost import collective, tensor_shares
from partool.cost.case import Column, Layouts, TrainingJob
from partool.cost.collective import RankGroup
from partool.cost.kinds import Kind
from partool.cost.sequence import shares as sequence_shares
from partool.cost.time.attention import widths
from partool.layout.sequence import Order, Spans, shares
from partool.layout.startrail import Trails
from partool.plan.layout import Layout
from partool.spec.parallel import Inside, SequenceMethod
from partool.strategies.sequence import METHODS

TRADE_OPERATORS, BLOCK_OPERATORS, GATHER_OPERATORS = 6.0, 12.0, 10.0
"""Kernels that the host starts for an exchange of heads, for a block that comes and is merged, and for a gather."""


class AttentionSizes(NamedTuple):
    """The attention of one layer, of one micro-batch, on one tensor rank."""

    batch: int
    queries: int
    keys: int
    """Heads of keys, and as many of values; fewer than ``queries`` where several of these read the same."""
    key_dim: int
    """Width of a head of queries or keys."""
    value_dim: int
    """Width of a head of values, and of the result."""
    window: int | None = None
    """Tokens that a token sees, itself included."""


class Sent(NamedTuple):
    """Elements that one rank sends to others."""

    forward: int
    backward: int
    forward_wide: int = 0
    """In float32 or wider, whatever the type of computation."""
    backward_wide: int = 0

    def bytes(self, compute_bytes: int) -> tuple[int, int]:
        """Return the bytes of both passes, of elements of a width; wide ones have 4 bytes or more."""
        wide = max(compute_bytes, 4)
        return (
            self.forward * compute_bytes + self.forward_wide * wide,
            self.backward * compute_bytes + self.backward_wide * wide,
        )


NOTHING = Sent(0, 0)


class SentParts(NamedTuple):
    """Elements that a rank sends in one layer: within attention's core, and around it."""

    inside: Sent
    outside: Sent


class SequenceTeams(NamedTuple):
    """How ranks share sequences."""

    method: SequenceMethod
    ranks: int
    order: Order
    inner: int
    teams: int
    inside: Inside
    length: int
    columns: int

    @classmethod
    def of(cls, job: TrainingJob, layout: Layout) -> SequenceTeams:
        """Return that of a layout."""
        return cls(
            layout.sequence.method,
            layout.mesh.cp,
            layout.sequence.order,
            layout.sequence.ulysses,
            layout.sequence.teams,
            layout.sequence.inside,
            job.sequence_length,
            job.model.grid[1] if job.model.grid else 0,
        )

    @property
    def trails(self) -> Trails:
        """Places of the ranks of StarTrail."""
        return Trails(self.ranks, self.teams, self.inside)

    @property
    def shares(self) -> tuple[Spans, ...]:
        """Tokens of each rank."""
        found = shares(self.length, self.ranks, self.order, inner=self.inner, columns=self.columns)
        return self.trails.by_rank(found) if METHODS[self.method].keys == "teams" else found


class AttentionTransfer(NamedTuple):
    """Something that travels beside a part of attention; columns."""

    times: Column
    seconds: Column
    """Each time."""
    share: Column
    """Share of attention's time during which it travels."""


@dataclass
class ExchangeTime:
    """Seconds of what one layer sends in one pass over one micro-batch; fields are columns."""

    outside: Column = 0.0
    """Around attention's core, which recomputation of the core alone does not repeat."""
    inside: Column = 0.0
    """Within it, beside nothing."""
    steps: list[AttentionTransfer] = field(default_factory=list)
    """Transfers that overlap with attention."""
    hidden: Column = 0.0
    """Seconds of ``outside`` that projections hide."""
    turns: Column = 0.0
    """Changes of the axis that is cut, around whole layers."""
    operators: Column = 0.0
    """That the host starts for it."""

    @property
    def rings(self) -> Column:
        """Seconds of all that is within attention's core."""
        return self.inside + sum(step.times * step.seconds for step in self.steps)

    @property
    def total(self) -> Column:
        """Seconds of all, hidden or not."""
        return self.outside + self.turns + self.rings

    def exposed_core(self, job: TrainingJob, attention_s: Column) -> Column:
        """Return what shows of what is within the core: what outlasts the attention beside which it travels."""
        stack, shown = job.stack, self.inside
        for times, seconds, share in self.steps:
            left = np.maximum(seconds - stack.overlap_blocks * share * attention_s, 0.0)
            shown = shown + times * (left + (stack.contention - 1.0) * (seconds - left))
        return shown

    def exposed(self, job: TrainingJob, attention_s: Column) -> Column:
        """Return what shows of all."""
        return self.exposed_core(job, attention_s) + self.outside - self.hidden + self.turns

    def add(self, there: Column, other: ExchangeTime) -> None:
        """Take another method's figures where that is used."""

        def where(value: Column) -> Column:
            return np.where(there, value, 0.0)

        self.outside = self.outside + where(other.outside)
        self.inside = self.inside + where(other.inside)
        self.steps += [step._replace(times=where(step.times)) for step in other.steps]
        self.hidden, self.turns = self.hidden + where(other.hidden), self.turns + where(other.turns)
        self.operators = self.operators + where(other.operators)


@dataclass(frozen=True)
class SequencePass:
    """One layer's pass, as each method's function reads it."""

    job: TrainingJob
    layouts: Layouts
    kind: Kind
    backward: bool

    @property
    def rows(self) -> Column:
        """Tokens of a micro-batch on the fullest rank."""
        return self.layouts.micro_batch * sequence_shares.tokens(self.job, self.layouts)

    @property
    def windowed(self) -> bool:
        """Whether the layer's tokens see a window only, shorter than the sequence."""
        return self.kind.window is not None and self.kind.window < self.job.sequence_length

    @property
    def small(self) -> int:
        """Bytes of an element."""
        return self.job.compute_bytes

    @property
    def wide(self) -> int:
        """Bytes of an element of sums over ranks."""
        return max(self.job.compute_bytes, 4)

    @property
    def key_width(self) -> Column:
        """Elements of a token's keys and values within attention."""
        _, keys, values = widths(self.job, self.layouts)
        _, heads = tensor_shares.heads(self.job.model, self.layouts.tp)
        return (keys + values) / heads * sequence_shares.heads(self.job, self.layouts).keys

    def group(self, size: Column, stride: Column) -> RankGroup:
        """Return ranks of one sequence that lie ``stride`` apart in their order."""
        return collective.group(self.job, size, stride * self.layouts.tp)


class AttentionElements(NamedTuple):
    """Elements per token of this rank, within attention, on the rank that works on most heads; columns."""

    query: Column
    keys: Column
    """Elements of keys and values."""
    result: Column
    sums: Column
    """Sums of exponentials, one per head."""


@dataclass(frozen=True)
class AttentionBuffers:
    """The attention of one layer in the pass that needs more memory, as each method's function reads it."""

    job: TrainingJob
    layouts: Layouts
    sizes: AttentionElements
    window: int | None
    """Tokens of the widest window where all layers have one shorter than the sequence."""

    @property
    def small(self) -> int:
        """Bytes of an element."""
        return self.job.compute_bytes

    @property
    def wide(self) -> int:
        """Bytes of an element of sums over ranks."""
        return max(self.job.compute_bytes, 4)
