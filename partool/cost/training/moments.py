"""A moment of a step: the bytes of tensors that exist together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partool.cost.case import Column, Mask
from partool.cost.training.pass_bytes import PassBytes
from partool.cost.training.states import States
from partool.plan.terms import MEMORY_TERMS


@dataclass(frozen=True)
class Moment:
    """Bytes that exist together, beside parameters and the optimizer's state; each field is a column, or a name."""

    name: str
    gathered: Column = 0.0
    gradients: Column = 0.0
    activations: Column = 0.0
    loss: Column = 0.0
    communication: Column = 0.0
    working: Column = 0.0
    """Part of ``activations`` that exists within one layer's backward pass only."""
    within: Column = 0.0
    """Part of ``loss`` that exists only inside of a kernel."""
    grads_offloading: Column = 0.0
    """Part of ``gradients`` that waits for its transfer to the host."""
    freed: Column = 0.0
    """Bytes of blocks that stay empty at this moment, as the next tensor does not fit into them."""
    idle: Column = 0.0
    """Bytes that tensors of other streams have left, whose memory the allocator keeps for these streams."""
    occurs: Column | Mask = True
    """False for layouts whose steps have no such moment."""

    @property
    def total(self) -> Column:
        """Bytes of all terms of the moment."""
        return self.gathered + self.gradients + self.activations + self.loss + self.communication

    def only(self, mask: Mask) -> Moment:
        """Return the moment as one that occurs only where ``mask`` is true as well."""
        return Moment(**{**self.__dict__, "occurs": np.logical_and(self.occurs, mask)})

    def of_each(self, count: int) -> list[Moment]:
        """Return the moment at each of ``count`` places of the columns, as single numbers.

        Where it does not occur, all numbers are 0.
        """
        columns = {
            part: np.broadcast_to(np.where(self.occurs, getattr(self, part), 0.0), count).tolist() for part in _PARTS
        }
        return [Moment(self.name, **{part: columns[part][place] for part in _PARTS}) for place in range(count)]


VARYING = ("gathered", "gradients", "activations", "loss", "communication")
"""Memory terms that differ between moments of a step."""
_PARTS = (*VARYING, "working", "within", "grads_offloading", "freed", "idle")
assert set(VARYING) <= set(MEMORY_TERMS)


def fullest(moments: Sequence[Moment]) -> Moment:
    """Return the moment with the most bytes, chosen for each layout; the first moment has to occur for all layouts."""
    if len(moments) == 1:
        return moments[0]
    shapes = {np.shape(getattr(each, part)) for each in moments for part in (*_PARTS, "occurs")}
    shape = np.broadcast_shapes(*shapes)
    most, which = np.array(np.broadcast_to(moments[0].total, shape)), np.zeros(shape, np.int16)
    for place, each in enumerate(moments[1:], 1):
        total = np.where(each.occurs, each.total, -1.0)
        np.copyto(which, place, where=total > most)
        np.maximum(most, total, out=most)
    chosen = {part: np.zeros(shape) for part in _PARTS}
    for place, each in enumerate(moments):
        here = which == place
        # Few of the moments are the fullest of any layout, so that most need no copies.
        if here.any():
            for part, column in chosen.items():
                np.copyto(column, getattr(each, part), where=here)
    return Moment("fullest", **chosen)


def either(condition: Mask, one: Moment, other: Moment) -> Moment:
    """Return ``one`` where the condition holds, else ``other``."""
    parts = {part: np.where(condition, getattr(one, part), getattr(other, part)) for part in _PARTS}
    return Moment(one.name, **parts)


def plain_moments(state: States, passes: PassBytes) -> list[Moment]:
    """Return the moments of a code base of which only sums are known.

    They are the loss, the first layer of the backward pass, the end of the backward pass and the optimizer's step.
    """
    # When one micro-batch's backward pass ends, the others in flight still have their activations.
    others = passes.saved * (1.0 - 1.0 / np.maximum(passes.in_flight, 1.0))
    lasting = {"gathered": state.gathered, "communication": state.buffers + passes.exchanged + passes.copies}
    freed, working = np.where(passes.loss > 0, passes.freed, 0.0), passes.backward_peak_bytes
    return [
        Moment(
            "loss", gradients=state.gradients_before, activations=passes.saved, loss=passes.loss, freed=freed, **lasting
        ),
        Moment("first layer", gradients=state.gradients_before, activations=passes.saved + working, **lasting),
        Moment("last layer", gradients=state.gradients, activations=others + working, **lasting),
        Moment("update", gradients=state.gradients_at_step, **lasting),
    ]


def ring_moments(state: States, passes: PassBytes, cast_bytes: int, updating: Column) -> list[Moment]:
    """Return the moments of a rank that passes weights on.

    ``cast_bytes`` are those of a cast weight, 0 without casts; ``updating`` are those of the update's temporaries.
    A stage's backward pass runs its layers again, or follows its forward pass at once. The head's weights are cast for
    the loss, and its gradients are added up with those of the other parameters.
    """
    others = passes.saved * (1.0 - 1.0 / np.maximum(passes.in_flight, 1.0)) + passes.tables
    lasting = {"gathered": state.gathered, "communication": passes.exchanged + passes.copies}
    with_head = lasting | {"gathered": state.gathered + cast_bytes * state.root_elements}
    at_update = lasting | {"communication": passes.exchanged + passes.copies + updating}
    before, saved = state.gradients_before, passes.saved + passes.tables
    freed, working = np.where(passes.loss > 0, passes.freed, 0.0), passes.backward_peak_bytes
    return [
        Moment(
            "loss", gradients=before, activations=saved + passes.result, loss=passes.loss, within=passes.loss_within,
            freed=freed, **with_head,
        ),
        Moment(
            "loss, backward", gradients=before, activations=saved, loss=passes.loss_backward, freed=freed, **lasting
        ),
        Moment(
            "first layer", gradients=before, activations=saved - passes.of_norm + working, working=working, **lasting
        ),
        Moment("last layer", gradients=state.gradients, activations=others + working, working=working, **lasting),
        Moment("update", gradients=state.gradients_at_step, activations=passes.tables, **at_update),
    ]  # fmt: skip
