"""The moments of a step at which a rank of partool's runtime may hold most memory on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partool.cost.case import Column, Layouts, Mask
from partool.cost.memory.rank_parameters import BegunStages
from partool.cost.training.moments import Moment
from partool.cost.training.optimizer import working_bytes
from partool.cost.training.runtime_step import Step, UnitElements
from partool.cost.training.states import States
from partool.cost.training.work import PassBytes
from partool.work.training import TrainingWork


def moments(job: TrainingWork, layouts: Layouts, state: States, done: PassBytes) -> list[Moment]:
    """Return the moments of a rank.

    The backward passes of a step's first micro-batch find no gradients yet, but in a pipeline they may find more
    micro-batches in flight than later ones do.
    """
    step = Step.of(job, layouts, state, done)
    found = [
        Moment(
            "update",
            gradients=state.gradients_at_step,
            activations=done.tables,
            communication=working_bytes(job, layouts),
        )
    ]
    alone = np.maximum(layouts.chunks, 1) == 1
    found += _Pass(step, True, done.saved, 0.0, state.leaving, alone).moments()
    several = np.asarray(layouts.accumulation) > 1
    if not several.any():
        return found
    if done.begun:
        for one in done.begun:
            found += [each.only(several & (one.in_flight > 0)) for each in _some_begun(step, one).moments()]
        return found
    less = np.maximum(done.in_flight - _later(layouts, done.in_flight), 0.0)
    saved = done.saved - less * done.of_layer * done.layers
    # The loss has the micro-batches of the last stage only.
    of_loss = np.minimum(less, np.maximum(done.ending - 1.0, 0.0)) * done.loss_held
    others = _Pass(step, False, saved, of_loss, state.gradients_before, True)
    return [*found, *(each.only(several) for each in others.moments())]


def _later(layouts: Layouts, most: Column) -> Column:
    """Return the micro-batches in flight when gradients of all stages of a rank exist; ``most`` are in flight at all.

    They do once backward passes have reached the first of the rank's stages. Where stages are folded, this is a bound
    from below (:mod:`partool.schedule.begun` counts exactly).
    """
    chunks = np.maximum(layouts.chunks, 1)
    before = 1.0 + np.minimum(layouts.pp, layouts.accumulation) * (chunks - 1)
    folded = np.where(layouts.accumulation >= 2 * np.asarray(layouts.pp), most, 0.0)
    folded = np.maximum(folded, (np.minimum(layouts.pp, layouts.accumulation) - 1) / chunks)
    return np.minimum(most, np.where(layouts.folded, folded, layouts.accumulation - before / chunks))


def _some_begun(step: Step, one: BegunStages) -> _Pass:
    """Return the passes when a part of a rank's stages has gradients."""
    done = step.done
    less = np.maximum(done.in_flight - one.in_flight, 0.0) * done.of_layer * done.layers
    of_loss = np.maximum(done.ending - one.ending, 0.0) * done.loss_held
    return _Pass(step, False, done.saved - less, of_loss, one.share * step.state.gradients_before, True)


class _Place(NamedTuple):
    """The backward pass of one layer with experts that ranks share."""

    name: str
    coming: UnitElements
    """Parameters that are gathered meanwhile."""
    left: Column
    """Elements of parameters that stages below ZeRO-3 still hold gathered."""
    gradients: Column
    """Bytes of other units' gradients."""
    saved: Column
    """Bytes of saved activations."""
    earlier: UnitElements
    """Unit that is being reduced when the pass begins."""
    occurs: Mask
    """True for layouts that have this layer."""


@dataclass(frozen=True)
class _Pass:
    """The passes of a step's first micro-batch, or of later ones."""

    step: Step
    first: bool
    saved: Column
    """Bytes that all micro-batches in flight save."""
    less: Column
    """Bytes by which the loss needs less than in the first micro-batch."""
    before: Column
    """Bytes of gradients when a backward pass begins."""
    of_first_stage: Mask
    """False where the pass is that of the rank's last stage, which does not begin with the embedding."""

    def moments(self) -> list[Moment]:
        """Return the moments in their order."""
        experts = self._of_experts() if self.step.split else ()
        return [*self._of_loss(), *self._of_last_layers(), *self._of_first_layers(), *experts, *self._of_ends()]

    @property
    def _input_elements(self) -> Column:
        """Elements of the embedding, if the stage begins with it."""
        return np.where(self.of_first_stage, self.step.state.input_elements, 0.0)

    @cached_property
    def _coming(self) -> UnitElements:
        """Parameters that are gathered during the last layer's backward pass."""
        step = self.step
        return step.ahead_of(step.last).where(step.done.of_stage > 1, UnitElements(self._input_elements))

    def _gradients(self, missing: UnitElements) -> Column:
        """Return the bytes of gradients while those of the unit ``missing`` have not been computed."""
        if not self.first:
            return self.before
        others = np.where(self.of_first_stage, 0.0, self.step.done.layers - self.step.done.of_stage)
        there = self.step.state.gradients - self.step.sums(missing) - others * self.step.sums(self.step.last)
        return np.maximum(there, self.before)

    def _of_loss(self) -> Iterator[Moment]:
        step, done, root = self.step, self.step.done, self.step.state.root_elements
        # The last layer's message outlives the forward pass (``all_gather_state``); stages below 3 gather once a step.
        last = step.last_message if self.first else np.where(step.stage3, step.last_message, 0.0)
        there = np.where(done.loss > 0, 1.0, 0.0)
        parts = {"gradients": self.before, "freed": there * done.freed}
        yield step.moment(
            "loss", there * last, gathered=step.gathered(root), loss=done.loss - self.less, within=done.loss_within,
            activations=self.saved + done.result + done.handed, **parts,
        )  # fmt: skip
        ahead = step.ahead_of(step.last)
        yield step.moment(
            "loss, backward", step.message(ahead), gathered=step.gathered(root, ahead.elements),
            loss=done.loss_backward - self.less, activations=self.saved + done.handed, **parts,
        )  # fmt: skip

    def _of_last_layers(self) -> Iterator[Moment]:
        step, done, layer = self.step, self.step.done, self.step.last.elements
        unit, ahead = step.rest(step.last), step.ahead_of(step.last)
        root, everything = step.state.root_elements, step.state.gathered / step.small
        saved, working, coming = self.saved - done.of_norm, self._last_working, self._coming.elements
        lone = step.stage3 & ((coming == 0) | (step.ahead == 0))
        if np.any(lone):
            # The layer's message is there until it is copied out; no message follows.
            own = np.where(root > 0, done.stream, 0.0) + done.handed
            yield step.moment(
                "last layer, gathered", step.last_message, gathered=step.gathered(root + layer), gradients=self.before,
                activations=saved + own, loss=done.loss_after, working=own,
            ).only(lone)  # fmt: skip
        yield step.moment(
            "last layer", step.message(self._coming), gathered=step.gathered(root + layer, coming), working=working,
            gradients=self.before, activations=saved + working, loss=done.loss_after,
        )  # fmt: skip
        # Where gradients accumulate, a unit's sums exist together with what is added to them.
        rest, matrices, result = saved - done.of_layer, step.small * unit.common, step.reduced(unit)
        experts = step.reduced(step.last._replace(common=0.0))
        first_sum = np.where(step.reduces, experts, step.wide * layer) if self.first else 0.0
        ended = result + step.divided(unit) >= matrices
        own, message = np.where(ended, 0.0, matrices) + done.stream, np.where(ended, result, 0.0)
        reduction = step.reduction(unit) + np.where(ended, step.divided(unit), 0.0)
        yield step.moment(
            "last layer, reduced", step.message(self._coming), gathered=step.gathered(root, coming, everything - layer),
            gradients=self.before + first_sum + (message if self.first else 0.0), activations=rest + own,
            loss=done.loss_after, communication=reduction + (0.0 if self.first else message), working=own,
        )  # fmt: skip
        yield step.moment(
            "last layer but one", step.message(ahead), gradients=self._before_last_but_one,
            gathered=step.gathered(root + layer, ahead.elements, everything - layer), activations=rest + working,
            loss=done.loss_after, communication=step.reduction(unit), working=working,
        ).only(done.of_stage > 2)  # fmt: skip

    @property
    def _before_last_but_one(self) -> Column:
        """Bytes of gradients when the last layer has got its own."""
        one = self.step.sums(self.step.last) if self.first else 0.0
        return np.minimum(self.before + one, np.maximum(self.step.state.gradients, self.before))

    @property
    def _others(self) -> Column:
        """Bytes that the other micro-batches in flight save when one backward pass ends."""
        done = self.step.done
        return np.maximum(self.saved - done.of_norm - done.of_layer * done.of_stage, 0.0)

    def _of_first_layers(self) -> Iterator[Moment]:
        step, done, root = self.step, self.step.done, self.step.state.root_elements
        first, layer, second = self._input_elements, step.layer(0), step.layer(1)
        following = np.where(done.of_stage > 1, step.reduction(step.rest(second)), 0.0)
        yield step.moment(
            "first layer", step.message(UnitElements(first)), communication=following, working=self._working(0),
            gathered=step.gathered(root + layer.elements, first, root + layer.elements + first), loss=done.loss_after,
            gradients=self._gradients(self._unless_ended(layer)),
            activations=self._others + done.of_layer + self._working(0),
        )  # fmt: skip
        if np.any(step.copied.common):
            # Without this copy, the moment "embedding" has more bytes.
            yield step.moment(
                "first layer, reduced", step.message(UnitElements(first)), loss=done.loss_after, working=done.stream,
                gathered=step.gathered(root, first, root + first), activations=self._others + done.stream,
                gradients=self._gradients(self._unless_ended(UnitElements(0.0))),
                communication=step.reduction(step.rest(layer)) + step.divided(step.rest(layer)),
            ).only(step.copied.common > 0)  # fmt: skip
        ahead, both = step.ahead_of(layer), layer.plus(second)
        yield step.moment(
            "second layer", step.message(ahead), loss=done.loss_after, working=self._working(1),
            communication=step.reduction(step.rest(step.layer(2))), gradients=self._gradients(self._unless_ended(both)),
            gathered=step.gathered(root + second.elements, ahead.elements, root + both.elements + first),
            activations=self._others + 2 * done.of_layer + self._working(1),
        ).only(done.of_stage > 3)  # fmt: skip

    @cached_property
    def _last_working(self) -> Column:
        """Bytes of the backward pass of the rank's last layer."""
        step, done = self.step, self.step.done
        return np.where(step.state.dense_first > 0, done.moe_at_work, done.at_work) if step.mixed else done.at_work

    def _working(self, place: int) -> Column:
        """Return the bytes of the backward pass of the rank's layer at a place, counted from 0."""
        step, last = self.step, self._last_working
        return np.where(step.state.dense_first > place, step.done.dense_at_work, last) if step.mixed else last

    def _unless_ended(self, unit: UnitElements) -> UnitElements:
        """Return a unit together with those whose gradients come after all layers'."""
        return UnitElements(unit.common + self._input_elements + self.step.state.root_elements, unit.expert)

    def _places(self) -> tuple[_Place, ...]:
        """Return the layers with experts of which one may have the fullest moment."""
        step, done, layer = self.step, self.step.done, self.step.moe
        first, everything = self._input_elements, step.state.gathered / step.small
        saved, dense, ahead = self.saved - done.of_norm, step.state.dense_first, step.ahead_of(self.step.moe)
        earlier, none = step.rest(layer), UnitElements(0.0)
        before = UnitElements(step.dense.common).where(dense > 0, UnitElements(first))
        one, two = (self._unless_ended(step.dense.times(dense).plus(layer.times(count))) for count in (1, 2))
        return (
            _Place("last layer", self._coming, everything, self.before, saved, none, done.of_stage > 0),
            _Place("last layer but one", ahead, everything - layer.elements, self._before_last_but_one,
                   saved - done.of_layer, earlier, done.of_stage > 2),
            _Place("first layer", before, one.elements, self._gradients(one),
                   self._others + (dense + 1) * done.of_layer, earlier, done.of_stage > dense + 1),
            _Place("second layer", ahead, two.elements, self._gradients(two),
                   self._others + (dense + 2) * done.of_layer, earlier, done.of_stage > dense + 3),
        )  # fmt: skip

    def _of_experts(self) -> Iterator[Moment]:
        """FSDP2 reduces the gradients of experts that ranks share before the rest of their layer follows."""
        step, done, experts = self.step, self.step.done, self.step.moe._replace(common=0.0)
        own = step.state.root_elements + step.moe.common
        matrices, result, reduction = step.small * experts.expert, step.reduced(experts), step.reduction(experts)
        sums = step.sums(experts) if self.first else 0.0
        ended = result + step.divided(experts) >= matrices
        divided = np.where(ended, step.divided(experts), 0.0)
        matrices, result = np.where(ended, 0.0, matrices), np.where(ended, result, 0.0)
        with_result = (result if self.first else 0.0) + np.where(step.reduces, 0.0, sums)
        for place in self._places():
            there, coming, loss = (experts.expert > 0) & place.occurs, place.coming, done.loss_after
            if not np.any(there):
                continue
            if np.any(step.state.dense_first):
                yield step.moment(
                    f"{place.name}, experts", step.message(coming), activations=place.saved + done.moe_at_work,
                    gathered=step.gathered(own + experts.expert, coming.elements, place.left), loss=loss,
                    gradients=place.gradients, communication=step.reduction(place.earlier), working=done.moe_at_work,
                ).only(there & (step.state.dense_first > 0))  # fmt: skip
            if np.any(done.recomputing):
                yield step.moment(
                    f"{place.name}, recomputed", np.where(step.by_unit, 0.0, step.message(coming)),
                    gathered=step.gathered(own + experts.expert, coming.elements, place.left),
                    gradients=place.gradients, activations=place.saved + done.recomputing, loss=loss,
                    communication=step.reduction(place.earlier), working=done.recomputing,
                ).only(there & (done.recomputing > 0))  # fmt: skip
            gathered = step.gathered(own, coming.elements, place.left - experts.expert)
            yield step.moment(
                f"{place.name}, experts reduced", step.message(coming), gathered=gathered,
                gradients=place.gradients + with_result, activations=place.saved + done.reducing + matrices, loss=loss,
                communication=reduction + divided + (0.0 if self.first else result),
                working=np.maximum(done.reducing + matrices, 0.0),
            ).only(there)  # fmt: skip
            yield step.moment(
                f"{place.name}, after experts", step.message(coming), gathered=gathered, loss=loss,
                gradients=place.gradients + sums, activations=place.saved + done.after, communication=reduction,
                working=np.maximum(done.after, 0.0),
            ).only(there)  # fmt: skip

    def _of_ends(self) -> Iterator[Moment]:
        """FSDP2 reduces the root's gradients first, then those of the embedding, whose inputs have no gradients."""
        step, done, state = self.step, self.step.done, self.step.state
        first, root = state.input_elements, state.root_elements
        rows, there = step.small * first, first + state.tied_elements > 0
        missing = np.where(step.reduces, 1.0, 0.0)
        # Of a tied matrix there are both gradients and their sum; the head's counts as the loss's.
        working = rows + np.maximum(done.stream, step.small * state.tied_elements) + step.small * state.tied_elements
        yield step.moment(
            "embedding", gathered=step.gathered(root + first, left=root + first), loss=done.loss_after, working=working,
            gradients=self._gradients(UnitElements(first + root)), activations=self._others + working,
            communication=step.reduction(step.rest(step.layer(0))),
        ).only(there)  # fmt: skip
        result, divided = step.reduced(UnitElements(root)), step.divided(UnitElements(root))
        ended = result + divided >= done.loss_after
        reduction = step.reduction(UnitElements(root)) + np.where(ended, divided, 0.0)
        yield step.moment(
            "head, reduced", gathered=step.gathered(first, left=first), loss=np.where(ended, 0.0, done.loss_after),
            gradients=self._gradients(UnitElements(missing * (first + np.where(ended, 0.0, root)))), working=rows,
            activations=self._others + rows,
            communication=reduction + (0.0 if self.first else np.where(ended, result, 0.0)),
        )  # fmt: skip
        result, divided = step.reduced(UnitElements(first)), step.divided(UnitElements(first))
        ended = result + divided >= rows
        reduction = step.reduction(UnitElements(first)) + np.where(ended, divided, 0.0)
        own = np.where(ended, 0.0, rows)
        yield step.moment(
            "embedding, reduced", gathered=step.gathered(0.0, left=0.0), activations=self._others + own, working=own,
            gradients=self._gradients(UnitElements(missing * np.where(ended, 0.0, first))),
            communication=reduction + (0.0 if self.first else np.where(ended, result, 0.0)),
        ).only(first > 0)  # fmt: skip
