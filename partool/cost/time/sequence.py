"""Seconds of what sequence parallelism sends around one attention layer, and what of it compute hides.

Ulysses (arXiv 2309.14509): all-to-alls of keys, queries and values, and of the result. Ring (arXiv 2310.01889): blocks
of keys and values go once around beside the attention to the block before, in the backward pass with their gradients; a
window needs its neighbours' tokens only. USP (arXiv 2405.07719): the one within the other. StarTrail (arXiv
2407.00611): rings of blocks of whole teams. DSP (arXiv 2403.10266): the hidden state changes the axis that is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from partool.cost import collective, tensor_shares
from partool.cost.case import (
    ALL_GATHER,
    DSP,
    INSIDES,
    RING_OF_KEYS,
    STARTRAIL,
    ULYSSES,
    USP,
    ZIGZAG,
    Column,
    Layouts,
    TrainingJob,
)
from partool.cost.collective import RankGroup
from partool.cost.kinds import Kind
from partool.cost.sequence import shares as sequence_shares
from partool.cost.time.attention import keys_between, widths
from partool.cost.time.gemm import matmul_s

_RINGS = INSIDES.index("rings")
_TRADE_OPERATORS, _BLOCK_OPERATORS, _GATHER_OPERATORS = 6.0, 12.0, 10.0
"""Kernels that the host starts for an exchange of heads, for a block that comes and is merged, and for a gather."""


class AttentionTransfer(NamedTuple):
    """Something that travels beside a part of attention; columns."""

    times: Column
    seconds: Column
    """Each time."""
    share: Column
    """Of attention's time, beside which it travels."""


@dataclass
class ExchangeTime:
    """Seconds of what one layer sends in one pass over one micro-batch; fields are columns."""

    outside: Column = 0.0
    """Around attention's core, which recomputation of the core alone does not repeat."""
    inside: Column = 0.0
    """Within it, beside nothing."""
    steps: list[AttentionTransfer] = field(default_factory=list)
    """Of what travels beside attention."""
    hidden: Column = 0.0
    """Of what is outside, what projections hide."""
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


def exchange(job: TrainingJob, layouts: Layouts, kind: Kind, *, backward: bool) -> ExchangeTime:
    """Return what ranks that share a sequence send for one layer."""
    found, several = ExchangeTime(), np.asarray(layouts.cp) > 1
    if not np.any(several):
        return found
    method = np.asarray(layouts.sequence_method)
    windowed = kind.window is not None and kind.window < job.sequence_length
    rings = _halo if windowed else _ring
    forms = (
        ((method == ULYSSES) | (method == USP), _trade),
        ((method == RING_OF_KEYS) | (method == USP), rings),
        (method == STARTRAIL, _halo if windowed else _startrail),
        (method == ALL_GATHER, _halo if windowed else _gather),
        (method == DSP, _turn),
    )
    for used, form in forms:
        there = several & used
        if np.any(there):
            found.add(there, form(SequencePass(job, layouts, kind, backward)))
    return found


def _trade(one: SequencePass) -> ExchangeTime:
    """Return the exchanges of heads for tokens, each beside the projection that follows it.

    Forward keys, then queries leave, each beside the next projection; backward the gradients of values come back first,
    and pass through their projection while the others are under way.
    """
    job, layouts = one.job, one.layouts
    ranks, small = sequence_shares.trading(layouts), one.small
    group = one.group(ranks, 1)
    query, key, value = widths(job, layouts)
    _, keys = tensor_shares.heads(job.model, layouts.tp)
    found = sequence_shares.heads(job, layouts)
    rows = one.rows * small
    # Each rank sends all heads of its tokens, and for the result all tokens of its heads.
    key_s, query_s, value_s, result_s = (
        collective.all_to_all_s(job, rows * width, group)
        for width in (
            key / keys * found.all_keys,
            query,
            value / keys * found.all_keys,
            ranks * found.queries * (value / keys if job.model.mla else job.model.head_dim),
        )
    )
    passes = 2.0 if one.backward else 1.0
    projections = (matmul_s(job, one.rows, width, job.model.hidden) for width in (query, value))
    of_query, of_value = (passes * each for each in projections)
    beside = ((query_s, of_value), (key_s, of_query)) if one.backward else ((key_s, of_query), (query_s, of_value))
    # With tensor ranks the three projections are one product, and a compiler orders exchanges by itself.
    able = (np.asarray(layouts.tp) == 1) & (np.asarray(layouts.compiled) == 0)
    hidden = sum(np.minimum(sent, job.stack.overlap_products * product) for sent, product in beside)
    return ExchangeTime(
        outside=key_s + query_s + value_s + result_s,
        hidden=np.where(able, hidden / job.stack.contention, 0.0),
        operators=4 * _TRADE_OPERATORS,
    )


def _ring(one: SequencePass) -> ExchangeTime:
    """Return the steps of a ring, whose neighbours are as far apart as the ranks that trade heads are many.

    In the backward pass the gradients of a block leave once a visitor has attended to it, so they are a step behind,
    and the last ones go home beside nothing.
    """
    ranks, inner = sequence_shares.ring(one.layouts), sequence_shares.trading(one.layouts)
    block, group = one.rows * inner * one.key_width, one.group(ranks, inner)
    found = _steps(one, ranks, block, group, alone=2)
    if one.backward:
        found.inside = np.minimum(np.maximum(ranks - 1, 0), 1) * _hop_s(one, block * one.wide, group)
    return found


def _steps(one: SequencePass, ranks: Column, block: Column, group: RankGroup, *, alone: int) -> ExchangeTime:
    """Return the steps of a ring of blocks of so many elements.

    Backward, keys travel with no gradients ``alone`` times, and the last gradients that stay in the ring without keys.
    """
    steps, share = np.maximum(ranks - 1, 0), 1.0 / np.maximum(ranks, 1)
    narrow = _hop_s(one, block * one.small, group)
    if not one.backward:
        return ExchangeTime(steps=[AttentionTransfer(steps, narrow, share)], operators=steps * _BLOCK_OPERATORS)
    wide, both = (_hop_s(one, block * width, group) for width in (one.wide, one.small + one.wide))
    first = np.minimum(steps, alone)
    times = ((first, narrow), (steps - first, both), (np.clip(steps + 1 - alone, 0, 1), wide))
    return ExchangeTime(
        steps=[AttentionTransfer(count, seconds, share) for count, seconds in times],
        operators=2 * steps * _BLOCK_OPERATORS,
    )


def _hop_s(one: SequencePass, sent_bytes: Column, group: RankGroup) -> Column:
    """Return the seconds in which each rank of a ring hands something on, over the slowest link between neighbours."""
    far = group.domains > 1
    return collective.send_s(one.job, sent_bytes, np.where(far, one.job.domain, 1))


def _halo(one: SequencePass) -> ExchangeTime:
    """Return what windows need of the tokens before each stretch: ranks hold one, or two with zigzag.

    Backward the keys come first, and their gradients go back beside the attention to a rank's own tokens.
    """
    inner = sequence_shares.trading(one.layouts)
    ranks = one.layouts.cp // inner
    group = one.group(ranks, inner)
    share = tensor_shares.width(one.job.sequence_length, ranks)
    stretches = np.where(np.asarray(one.layouts.sequence_order) == ZIGZAG, 2, 1)
    rows = np.minimum(stretches * ((one.kind.window or 1) - 1), one.job.sequence_length - share)
    elements = one.layouts.micro_batch * rows * one.key_width
    window, near = one.kind.window or 1, np.where(ranks > 1, np.minimum(rows, 1), 0)
    # Beside the attention to a rank's own tokens.
    piece = share / stretches
    own = keys_between(0, piece, window) / np.minimum(window, one.job.sequence_length)
    narrow, wide = (_hop_s(one, elements * width, group) for width in (one.small, one.wide))
    if not one.backward:
        return ExchangeTime(steps=[AttentionTransfer(near, narrow, own)], operators=_BLOCK_OPERATORS)
    return ExchangeTime(
        inside=near * narrow, steps=[AttentionTransfer(near, wide, own)], operators=2 * _BLOCK_OPERATORS
    )


def _gather(one: SequencePass) -> ExchangeTime:
    """Return the gather of all keys and values, beside the attention to a rank's own; backward their gradients' sum."""
    group = one.group(one.layouts.cp, 1)
    whole = one.rows * one.layouts.cp * one.key_width
    found = ExchangeTime(
        steps=[AttentionTransfer(1, collective.gather_s(one.job, whole * one.small, group), 1.0 / one.layouts.cp)],
        operators=_GATHER_OPERATORS * (2.0 if one.backward else 1.0),
    )
    if one.backward:
        found.inside = collective.reduce_scatter_s(one.job, whole * one.wide, group)
    return found


def _startrail(one: SequencePass) -> ExchangeTime:
    """Return queries for the team, the placement of keys, rings of a team's keys, and partial results for the team.

    Backward the team needs queries, results and their gradients, and returns gradients of queries; those of keys go
    round with them and then home.
    """
    job, layouts = one.job, one.layouts
    members = np.maximum(layouts.sequence_teams, 1)
    ranks = sequence_shares.ring(layouts)
    teams_apart = np.asarray(layouts.sequence_inside) == _RINGS
    team = one.group(members, np.where(teams_apart, ranks, 1))
    circle = one.group(ranks, np.where(teams_apart, 1, members))
    across = one.group(members, ranks * members)
    query, _, values = widths(job, layouts)
    heads, keys = tensor_shares.heads(job.model, layouts.tp)
    result = values / keys * heads
    block = one.rows * members * one.key_width
    within = one.rows * members
    found = _steps(one, ranks, block, circle, alone=1)
    if one.backward:
        there = within * ((query + 2.0 * result) * one.small + heads * one.wide)
        back = within * query * one.small
    else:
        there, back = within * query * one.small, within * (result * one.small + heads * one.wide)
    sent = collective.all_to_all_s(job, there, team) + collective.all_to_all_s(job, back, team)
    near = one.group(ranks * members, 1)

    def placed(width: int) -> Column:
        # One ring of each group of ranks begins with a rank's keys, one of them in its own group.
        others = collective.all_to_all_s(job, block * width, across)
        return others + np.where(members > 1, _hop_s(one, block / members * width, near), 0.0)

    found.inside = found.inside + sent + placed(one.small) + (placed(one.wide) if one.backward else 0.0)
    found.operators = found.operators + 4 * _TRADE_OPERATORS
    return found


def _turn(one: SequencePass) -> ExchangeTime:
    """Return the exchanges of the hidden state around a layer."""
    group = one.group(one.layouts.cp, 1)
    hidden = one.job.model.hidden / tensor_shares.stream(one.job, one.layouts)
    each = collective.all_to_all_s(one.job, one.rows * hidden * one.small, group)
    return ExchangeTime(turns=one.kind.turns * each, operators=one.kind.turns * _TRADE_OPERATORS)
