"""Parameters that are gathered, and gradients that are reduced, at a moment of a step of partool's runtime.

FSDP2 decides when this happens; names in brackets are those of its code, ``torch/distributed/fsdp/_fully_shard``. It
gathers a *unit* at once: the embedding, a layer, the experts of a layer if ranks share them, or the *root*, which is
the final norm with the head. Only the root stays gathered between its forward and its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partool.cost.case import Column, Layouts, Mask
from partool.cost.training.moments import Moment
from partool.cost.training.pass_bytes import PassBytes
from partool.cost.training.states import States, state_shards
from partool.work.training import TrainingWork


class UnitElements(NamedTuple):
    """Numbers of elements of a unit, or of several; each field is a column."""

    common: Column
    """Elements outside of experts, and of experts that are sharded as their layer is."""
    expert: Column = 0.0
    """Elements of experts that ranks share."""
    frozen: Column = 0.0
    """Part of ``common`` that has no gradients."""
    frozen_expert: Column = 0.0

    @property
    def trained(self) -> UnitElements:
        """Elements that have gradients."""
        return UnitElements(
            np.maximum(self.common - self.frozen, 0.0), np.maximum(self.expert - self.frozen_expert, 0.0)
        )

    @property
    def elements(self) -> Column:
        """Elements of both sorts."""
        return self.common + self.expert

    def plus(self, other: UnitElements) -> UnitElements:
        """Return the elements of two units together."""
        return UnitElements(*(one + another for one, another in zip(self, other, strict=True)))

    def times(self, count: Column) -> UnitElements:
        """Return the elements of several such units."""
        return UnitElements(*(count * each for each in self))

    def where(self, mask: Mask, other: UnitElements) -> UnitElements:
        """Return this unit where ``mask`` is true, and ``other`` elsewhere."""
        return UnitElements(*(np.where(mask, *each) for each in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Step:
    """What the passes of a step have in common; each field is a column."""

    state: States
    passes: PassBytes
    small: int
    """Bytes of an element of gathered parameters and of gradients before their reduction."""
    wide: int
    """Bytes of an element of reduced gradients."""
    shards: Column
    stage3: Mask
    """True where only the parameters in use are gathered."""
    single: Mask
    """True where a step has one micro-batch: its backward pass reduces gradients and releases parameters."""
    reduces: Mask
    """True where the backward pass of every micro-batch reduces gradients; elsewhere they accumulate unsharded."""
    sent: UnitElements
    """Bytes per element of a unit that is being gathered: the message, from which its parameters are copied."""
    copied: UnitElements
    """Bytes per element of gradients that FSDP2 divides into a new tensor: those that one rank has whole, and others as
    well (``foreach_reduce``; the divisor is 1)."""
    by_unit: Mask
    """True where FSDP2 itself decides what is gathered ahead: the unit whose backward pass is next, not its layer."""
    ahead: float
    """Number of layers that are gathered while another one is in use."""
    apart: bool
    """True if each parameter is gathered into its own memory; then only shards are copied, where they are cast."""

    @classmethod
    def of(cls, job: TrainingWork, layouts: Layouts, state: States, passes: PassBytes) -> Step:
        """Return the common values of the passes of layouts' ranks with a state and with what their passes hold."""
        small, zero = job.compute_bytes, np.asarray(layouts.zero)
        shards = state_shards(layouts)
        single = np.asarray(layouts.accumulation) == 1
        apart = job.controls.gather == "sequential"

        def sent(ranks: Column) -> Column:
            # Without a message only shards of another type than the gathered parameters' are copied, to be cast.
            cast = small / ranks if small != job.master_bytes else 0.0
            return np.where(ranks > 1, cast if apart else small, 0.0)

        by_unit = np.full(np.shape(layouts.pp), job.controls.prefetch == 1 and not apart) & (
            np.asarray(layouts.pp) == 1
        )
        ranks = layouts.replicas * layouts.shards * layouts.cp

        def copied(sharers: Column, every: Column) -> Column:
            return np.where((sharers == 1) & (np.asarray(every) > 1), float(job.master_bytes), 0.0)

        of_experts = copied(state.expert_shards, ranks * layouts.tp / layouts.expert_ranks)
        messages = UnitElements(sent(shards), sent(state.expert_shards))
        return cls(
            state, passes, small, job.master_bytes, shards, zero == 3, single, (zero >= 2) | single, messages,
            UnitElements(copied(shards, ranks), of_experts), by_unit, ahead=float(job.controls.prefetch), apart=apart,
        )  # fmt: skip

    @cached_property
    def mixed(self) -> bool:
        """True if the model has layers with experts."""
        return bool(np.any(self.state.moe_elements))

    @cached_property
    def split(self) -> bool:
        """True if some layouts have experts that ranks share, which are units of their own."""
        return bool(np.any(self.state.expert_elements))

    @cached_property
    def dense(self) -> UnitElements:
        """A dense layer."""
        return UnitElements(self.state.dense_elements, frozen=self.state.frozen_dense)

    @cached_property
    def moe(self) -> UnitElements:
        """A layer with experts."""
        if not self.split:
            return UnitElements(self.state.moe_elements, frozen=self.state.frozen_moe)
        state = self.state
        return UnitElements(state.moe_elements, state.expert_elements, state.frozen_moe, state.frozen_expert)

    @cached_property
    def inputs(self) -> UnitElements:
        """The embedding."""
        return UnitElements(self.state.input_elements, frozen=self.state.frozen_input)

    @cached_property
    def root(self) -> UnitElements:
        """The final norm with the head."""
        return UnitElements(self.state.root_elements, frozen=self.state.frozen_root)

    @cached_property
    def last(self) -> UnitElements:
        """The rank's last layer; the largest layer, unless all dense layers come first."""
        if not self.mixed:
            return self.dense
        larger = (self.state.dense_first > 0) | (self.moe.elements >= self.dense.elements)
        return self.moe.where(larger, self.dense)

    def layer(self, place: int) -> UnitElements:
        """Return the rank's layer at a place, counted from 0; the largest one, unless all dense layers come first."""
        return self.dense.where(self.state.dense_first > place, self.last) if self.mixed else self.dense

    def rest(self, layer: UnitElements) -> UnitElements:
        """Return the unit of a layer that is reduced last: the layer without experts that ranks share."""
        if not self.mixed:
            return layer
        larger = self.dense.where(self.state.dense_elements >= self.state.moe_elements, self.moe)
        rest = layer.where(self.state.dense_first > 0, larger)
        return UnitElements(rest.common, frozen=rest.frozen)

    def ahead_of(self, layer: UnitElements) -> UnitElements:
        """Return what is gathered of a layer while the layer that follows it has its backward pass."""
        return layer._replace(expert=np.where(self.by_unit, 0.0, layer.expert)) if self.split else layer

    @cached_property
    def pool(self) -> Column:
        """Most bytes of messages at once: one is received while the one before is copied out.

        torch's allocator keeps blocks by stream, and messages have streams of their own: when they are freed, their
        memory does not serve other tensors. The same goes for reduced gradients.
        """
        first_bytes, layer = self._sent(UnitElements(self.state.input_elements)), self._sent(self.dense)
        pairs = [
            self._sent(UnitElements(self.state.root_elements)) + first_bytes,
            layer + np.maximum(layer, first_bytes),
        ]
        if self.mixed:
            common_bytes = self._sent(self.moe._replace(expert=0.0))
            pairs += [
                self._sent(self.moe),
                common_bytes + np.maximum(common_bytes * (self.moe.expert == 0.0), first_bytes),
            ]
        return np.asarray(np.maximum.reduce(np.broadcast_arrays(*pairs)))

    def _sent(self, unit: UnitElements) -> Column:
        return self._weighted(self.sent, unit)

    def _weighted(self, element_bytes: UnitElements, unit: UnitElements) -> Column:
        common_bytes = element_bytes.common * unit.common
        return common_bytes + element_bytes.expert * unit.expert if self.split else common_bytes

    def gathered(self, in_use: Column, prefetched: Column = 0.0, still_gathered: Column | None = None) -> Column:
        """Return the bytes of gathered parameters; the arguments are numbers of elements.

        With ZeRO-3 these are the parameters ``in_use``, those that stay gathered, and, where parameters are gathered
        into their own memory, those that are ``prefetched``. Other stages release parameters in the backward pass of
        a step's last micro-batch only (``set_reshard_after_backward``); if it is the only one, all but
        ``still_gathered`` are gone.
        """
        others = self.state.gathered
        if still_gathered is not None:
            others = np.where(self.single, np.minimum(others, self.small * still_gathered), others)
        with_next = in_use + (prefetched * self.ahead if self.apart else 0.0)
        return np.where(self.stage3, self.small * with_next + self.state.kept_gathered, others)

    def message(self, unit: UnitElements) -> Column:
        """Return the bytes of the message with which ZeRO-3 gathers a unit while another one is in use."""
        return np.where(self.stage3, self._sent(unit) * self.ahead, 0.0)

    @cached_property
    def last_message(self) -> Column:
        """Bytes of the last layer's last message, from which its experts are copied if ranks share them."""
        if not self.split:
            return self._sent(self.last)
        return self._sent(self.last._replace(common=np.where(self.last.expert > 0, 0.0, self.last.common)))

    def sums(self, unit: UnitElements) -> Column:
        """Return the bytes of a unit's gradients when its backward pass has ended: reduced, or summed unsharded."""
        return np.where(self.reduces, self.reduced(unit), self.wide * unit.trained.elements)

    def reduction(self, unit: UnitElements) -> Column:
        """Return the bytes of the buffer in which a unit's gradients are reduced (``reduce_scatter_input``).

        It lasts until the next unit's gradients are reduced (``reduce_scatter_states``).
        """
        return np.where(self.reduces, self.wide * unit.trained.elements, 0.0)

    def reduced(self, unit: UnitElements) -> Column:
        """Return the bytes of a unit's reduced gradients; all its gradients have been freed when these are allocated.

        Those of later micro-batches are added to earlier ones at once.
        """
        trained = unit.trained
        each = trained.common / self.shards
        if self.split:
            each = each + trained.expert / self.state.expert_shards
        return np.where(self.reduces, self.wide * each, 0.0)

    def divided(self, unit: UnitElements) -> Column:
        """Return the bytes of the copy of a unit's gradients that is made when these are divided."""
        return np.where(self.reduces, self._weighted(self.copied, unit.trained), 0.0)

    def moment(self, name: str, message: Column = 0.0, **parts: Column) -> Moment:
        """Return a moment, with what is there at all moments of the passes, and with ``message`` in communication."""
        passes, state = self.passes, self.state
        of_stream = np.where(self.reduces, parts["gradients"], 0.0)
        idle = np.maximum(self.pool - message, 0.0) + np.maximum(state.gradients_at_step - of_stream, 0.0)
        parts["communication"] = parts.get("communication", 0.0) + message + passes.copies + passes.received
        # Inputs of stages are in the buffers in which they were received.
        parts["activations"] = np.maximum(parts["activations"] - passes.inputs, 0.0)
        parts["activations"] = parts["activations"] + passes.tables + passes.numbers
        return Moment(name, grads_offloading=state.grads_offloading, idle=idle, **parts)
