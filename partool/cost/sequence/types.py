"""Types for the price of a method of sequence parallelism: its parts, and its functions' arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from partool.cost import collective, tensor_shares
from partool.cost.case import Column, Layouts, at_rows
from partool.cost.collective import RankGroup
from partool.cost.kinds import Kind
from partool.cost.sequence import shares as sequence_shares
from partool.cost.time.attention import widths
from partool.layout.sequence import Order, Spans, shares
from partool.layout.startrail import Trails
from partool.plan.layout import Layout
from partool.spec.parallel import Inside, SequenceMethod
from partool.strategies.sequence import METHODS
from partool.work.base import Workload

TRADE_OPERATORS, BLOCK_OPERATORS, GATHER_OPERATORS = 6.0, 12.0, 10.0
"""Number of kernels that the host starts to exchange heads, to merge a received block, and to gather keys."""


class AttentionSizes(NamedTuple):
    """Sizes of one layer's attention over one micro-batch on one tensor rank."""

    batch: int
    queries: int
    keys: int
    """Number of key heads, and of value heads; fewer than ``queries`` where several query heads share one."""
    key_dim: int
    """Width of a head of queries or keys."""
    value_dim: int
    """Width of a head of values, and of the result."""
    window: int | None = None
    """Number of tokens that a token attends to, including the token itself."""


class Sent(NamedTuple):
    """Number of elements that one rank sends to other ranks."""

    forward: int
    backward: int
    forward_wide: int = 0
    """Number of elements sent forward in float32 or wider, whatever the compute type."""
    backward_wide: int = 0

    def bytes(self, compute_bytes: int) -> tuple[int, int]:
        """Return the bytes sent in the forward and in the backward pass; wide elements have 4 bytes or more."""
        wide = max(compute_bytes, 4)
        return (
            self.forward * compute_bytes + self.forward_wide * wide,
            self.backward * compute_bytes + self.backward_wide * wide,
        )


NOTHING = Sent(0, 0)


class SentParts(NamedTuple):
    """Numbers of elements that a rank sends in one layer: within the core of attention, and before or after it."""

    inside: Sent
    outside: Sent


class SequenceTeams(NamedTuple):
    """Sizes of the groups of ranks that share a sequence, and the tokens of each rank."""

    method: SequenceMethod
    ranks: int
    order: Order
    inner: int
    teams: int
    inside: Inside
    length: int
    columns: int

    @classmethod
    def of(cls, job: Workload, layout: Layout) -> SequenceTeams:
        """Return the group sizes of a layout, and the tokens of each rank."""
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
        """Positions of StarTrail's ranks in teams and rings."""
        return Trails(self.ranks, self.teams, self.inside)

    @property
    def shares(self) -> tuple[Spans, ...]:
        """Tokens of each rank."""
        spans = shares(self.length, self.ranks, self.order, inner=self.inner, columns=self.columns)
        return self.trails.by_rank(spans) if METHODS[self.method].keys == "teams" else spans


class AttentionTransfer(NamedTuple):
    """Transfers that each overlap with a part of attention; every field is a column."""

    times: Column
    seconds: Column
    """Seconds of each transfer."""
    share: Column
    """Share of attention's time that one transfer overlaps with."""


@dataclass
class ExchangeTime:
    """Seconds of the exchanges of one layer in one pass over one micro-batch; fields are columns."""

    outside: Column = 0.0
    """Seconds of exchanges before and after the core of attention; recomputing only the core does not repeat them."""
    inside: Column = 0.0
    """Seconds of exchanges within the core of attention that no compute hides."""
    steps: list[AttentionTransfer] = field(default_factory=list)
    """Transfers that overlap with attention."""
    hidden: Column = 0.0
    """Seconds of ``outside`` that projections hide."""
    turns: Column = 0.0
    """Seconds of changes of the sharded axis before and after whole layers."""
    outer_operators: Column = 0.0
    """Number of kernels that the host starts for the exchanges before and after the core of attention."""
    core_operators: Column = 0.0
    """Number of kernels that the host starts for the exchanges and the merges within the core of attention."""
    merges: Column = 0.0
    """Seconds of kernels that merge the results of received blocks; they are compute within the core of attention, and
    no part of the exchanges."""

    @property
    def operators(self) -> Column:
        """Number of kernels that the host starts for all exchanges."""
        return self.outer_operators + self.core_operators

    @property
    def rings(self) -> Column:
        """Seconds of all exchanges within the core of attention."""
        return self.inside + sum(step.times * step.seconds for step in self.steps)

    @property
    def total(self) -> Column:
        """Seconds of all exchanges, hidden or not."""
        return self.outside + self.turns + self.rings

    def of_rows(self, rows: Any) -> ExchangeTime:
        """Return the exchanges at the indices ``rows`` of their columns."""
        columns = {name: at_rows(column, rows) for name, column in self.__dict__.items() if name != "steps"}
        steps = [AttentionTransfer(*(at_rows(column, rows) for column in step)) for step in self.steps]
        return ExchangeTime(**columns, steps=steps)

    def exposed_core(self, job: Workload, attention_s: Column) -> Column:
        """Return the exposed seconds within the core: the part of the transfers that attention does not hide."""
        stack, shown = job.stack, self.inside
        for times, seconds, share in self.steps:
            exposed_s = np.maximum(seconds - stack.overlap_blocks * share * attention_s, 0.0)
            shown = shown + times * (exposed_s + (stack.contention - 1.0) * (seconds - exposed_s))
        return shown

    def exposed(self, job: Workload, attention_s: Column) -> Column:
        """Return the exposed seconds of all exchanges."""
        return self.exposed_core(job, attention_s) + self.outside - self.hidden + self.turns

    def add(self, mask: Column, other: ExchangeTime) -> None:
        """Add the seconds of ``other``, the exchanges of another method, in the layouts where ``mask`` is true."""

        def where(value: Column) -> Column:
            return np.where(mask, value, 0.0)

        self.outside = self.outside + where(other.outside)
        self.inside = self.inside + where(other.inside)
        self.steps += [step._replace(times=where(step.times)) for step in other.steps]
        self.hidden, self.turns = self.hidden + where(other.hidden), self.turns + where(other.turns)
        self.outer_operators = self.outer_operators + where(other.outer_operators)
        self.core_operators = self.core_operators + where(other.core_operators)
        self.merges = self.merges + where(other.merges)


@dataclass(frozen=True)
class SequencePass:
    """One pass of one layer: the argument of each method's ``exchange``."""

    job: Workload
    layouts: Layouts
    kind: Kind
    backward: bool

    @property
    def rows(self) -> Column:
        """Number of tokens of a micro-batch on the fullest rank."""
        return self.layouts.micro_batch * sequence_shares.tokens(self.job, self.layouts)

    @property
    def windowed(self) -> bool:
        """True if all of the layer's tokens attend within a window shorter than the sequence."""
        return self.kind.window is not None and self.kind.window < self.job.sequence_length

    @property
    def small(self) -> int:
        """Bytes of an element."""
        return self.job.compute_bytes

    @property
    def wide(self) -> int:
        """Bytes of an element in sums over ranks."""
        return max(self.job.compute_bytes, 4)

    @property
    def key_width(self) -> Column:
        """Number of elements of one token's keys and values within attention."""
        _, keys, values = widths(self.job, self.layouts)
        _, heads = tensor_shares.heads(self.job.model, self.layouts.tp)
        return (keys + values) / heads * sequence_shares.heads(self.job, self.layouts).keys

    @property
    def result_width(self) -> Column:
        """Number of elements of one token's result within attention."""
        _, _, values = widths(self.job, self.layouts)
        _, heads = tensor_shares.heads(self.job.model, self.layouts.tp)
        return values / heads * sequence_shares.heads(self.job, self.layouts).queries

    def group(self, size: Column, stride: Column) -> RankGroup:
        """Return a group of ``size`` ranks that are ``stride`` ranks apart among the ranks of one sequence."""
        return collective.group(self.job, size, stride * self.layouts.tp)


class AttentionElements(NamedTuple):
    """Numbers of elements per token within attention, on the rank with the most heads; fields are columns."""

    query: Column
    keys: Column
    """Number of elements of keys and values."""
    result: Column
    sums: Column
    """Number of sums of exponentials, one sum per head."""


@dataclass(frozen=True)
class AttentionBuffers:
    """Attention of one layer, in the pass that needs more memory: the argument of each method's ``buffers``."""

    job: Workload
    layouts: Layouts
    sizes: AttentionElements
    window: int | None
    """Number of tokens in the widest window, if all layers have a window shorter than the sequence; else None."""

    @property
    def small(self) -> int:
        """Bytes of an element."""
        return self.job.compute_bytes

    @property
    def wide(self) -> int:
        """Bytes of an element in sums over ranks."""
        return max(self.job.compute_bytes, 4)
