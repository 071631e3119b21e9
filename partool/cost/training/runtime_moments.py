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
from partool.cost.training.pass_bytes import PassBytes
from partool.cost.training.runtime_step import Step, UnitElements
from partool.cost.training.states import States
from partool.work.training import TrainingWork


def moments(job: TrainingWork, layouts: Layouts, state: States, passes: PassBytes) -> list[Moment]:
    """Return the moments of a rank.

    The backward passes of a step's first micro-batch find no gradients yet, but in a pipeline they may find more
    micro-batches in flight than later ones do.
    """
    step = Step.of(job, layouts, state, passes)
    candidates = [
        Moment(
            "update",
            gradients=state.gradients_at_step,
            activations=passes.tables,
            communication=working_bytes(job, layouts),
        )
    ]
    alone = np.maximum(layouts.chunks, 1) == 1
    candidates += _Pass(step, True, passes.saved, 0.0, state.grads_offloading, alone).moments()
    several = np.asarray(layouts.accumulation) > 1
    if not several.any():
        return candidates
    if passes.begun:
        for one in passes.begun:
            candidates += [each.only(several & (one.in_flight > 0)) for each in _some_begun(step, one).moments()]
        return candidates
    less = np.maximum(passes.in_flight - _later(layouts, passes.in_flight), 0.0)
    saved = passes.saved - less * passes.of_layer * passes.layers
    # The loss has the micro-batches of the last stage only.
    of_loss = np.minimum(less, np.maximum(passes.ending - 1.0, 0.0)) * passes.loss_per_micro_batch
    others = _Pass(step, False, saved, of_loss, state.gradients_before, True)
    return [*candidates, *(each.only(several) for each in others.moments())]


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
    passes = step.passes
    less = np.maximum(passes.in_flight - one.in_flight, 0.0) * passes.of_layer * passes.layers
    of_loss = np.maximum(passes.ending - one.ending, 0.0) * passes.loss_per_micro_batch
    return _Pass(step, False, passes.saved - less, of_loss, one.share * step.state.gradients_before, True)


class _Place(NamedTuple):
    """The backward pass of one layer with experts that ranks share."""

    name: str
    prefetched: UnitElements
    """Parameters that are gathered meanwhile."""
    still_gathered: Column
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
        return self._inputs.common

    @cached_property
    def _inputs(self) -> UnitElements:
        """The embedding, if the stage begins with it."""
        return self.step.inputs.where(self.of_first_stage, UnitElements(0.0))

    @cached_property
    def _prefetched(self) -> UnitElements:
        """Parameters that are gathered during the last layer's backward pass."""
        step = self.step
        return step.ahead_of(step.last).where(step.passes.of_stage > 1, self._inputs)

    def _gradients(self, missing: UnitElements) -> Column:
        """Return the bytes of gradients while those of the unit ``missing`` have not been computed."""
        if not self.first:
            return self.before
        others = np.where(self.of_first_stage, 0.0, self.step.passes.layers - self.step.passes.of_stage)
        computed = self.step.state.gradients - self.step.sums(missing) - others * self.step.sums(self.step.last)
        return np.maximum(computed, self.before)

    def _reduced(self, unit: UnitElements, gradients_bytes: Column) -> tuple[Mask, Column, Column, Column]:
        """Return what exists at the fullest moment of a unit's reduction, before which it has ``gradients_bytes``.

        These are: whether its gradients in the compute type have been freed, the bytes of those that have not, and of
        reduced gradients, in gradients and in communication. Those of a first micro-batch become gradients, others are
        added to these. Communication has the buffer, too, and the copy of gradients that are divided.
        """
        step, result, divided = self.step, self.step.reduced(unit), self.step.divided(unit)
        ended = result + divided >= gradients_bytes
        result, reduction = np.where(ended, result, 0.0), step.reduction(unit) + np.where(ended, divided, 0.0)
        in_gradients, in_communication = (result, 0.0) if self.first else (0.0, result)
        return ended, np.where(ended, 0.0, gradients_bytes), in_gradients, reduction + in_communication

    def _of_loss(self) -> Iterator[Moment]:
        step, passes, root = self.step, self.step.passes, self.step.state.root_elements
        # The last layer's message outlives the forward pass (``all_gather_state``); stages below 3 gather once a step.
        last = step.last_message if self.first else np.where(step.stage3, step.last_message, 0.0)
        has_loss = np.where(passes.loss > 0, 1.0, 0.0)
        parts = {"gradients": self.before, "freed": has_loss * passes.freed}
        yield step.moment(
            "loss", has_loss * last, gathered=step.gathered(root), loss=passes.loss - self.less,
            within=passes.loss_within, activations=self.saved + passes.result + passes.handed, **parts,
        )  # fmt: skip
        ahead = step.ahead_of(step.last)
        yield step.moment(
            "loss, backward", step.message(ahead), gathered=step.gathered(root, ahead.elements),
            loss=passes.loss_backward - self.less, activations=self.saved + passes.handed, **parts,
        )  # fmt: skip

    def _of_last_layers(self) -> Iterator[Moment]:
        step, passes, layer = self.step, self.step.passes, self.step.last.elements
        unit, ahead = step.rest(step.last), step.ahead_of(step.last)
        root, everything = step.state.root_elements, step.state.gathered / step.small
        saved, working, prefetched = self.saved - passes.of_norm, self._last_working, self._prefetched.elements
        no_prefetch = step.stage3 & ((prefetched == 0) | (step.ahead == 0))
        if np.any(no_prefetch):
            # The layer's message is there until it is copied out; no message follows.
            arriving = np.where(root > 0, passes.stream, 0.0) + passes.handed
            yield step.moment(
                "last layer, gathered", step.last_message, gathered=step.gathered(root + layer), gradients=self.before,
                activations=saved + arriving, loss=passes.loss_beside_layers, working=arriving,
            ).only(no_prefetch)  # fmt: skip
        yield step.moment(
            "last layer", step.message(self._prefetched), gathered=step.gathered(root + layer, prefetched),
            working=working, gradients=self.before, activations=saved + working, loss=passes.loss_beside_layers,
        )  # fmt: skip
        # Where gradients accumulate, a unit's sums exist together with what is added to them.
        rest = saved - passes.of_layer
        experts = step.reduced(step.last._replace(common=0.0))
        first_sum = np.where(step.reduces, experts, step.wide * step.last.trained.elements) if self.first else 0.0
        _, unreduced, result, reduction = self._reduced(unit, step.small * unit.trained.common)
        unreduced = unreduced + passes.stream
        yield step.moment(
            "last layer, reduced", step.message(self._prefetched), working=unreduced, activations=rest + unreduced,
            gathered=step.gathered(root, prefetched, everything - layer), loss=passes.loss_beside_layers,
            gradients=self.before + first_sum + result,
            communication=reduction,
        )  # fmt: skip
        yield step.moment(
            "last layer but one", step.message(ahead), gradients=self._before_last_but_one,
            gathered=step.gathered(root + layer, ahead.elements, everything - layer), activations=rest + working,
            loss=passes.loss_beside_layers, communication=step.reduction(unit), working=working,
        ).only(passes.of_stage > 2)  # fmt: skip

    @property
    def _before_last_but_one(self) -> Column:
        """Bytes of gradients when the last layer has got its own."""
        one = self.step.sums(self.step.last) if self.first else 0.0
        return np.minimum(self.before + one, np.maximum(self.step.state.gradients, self.before))

    @property
    def _others(self) -> Column:
        """Bytes that the other micro-batches in flight save when one backward pass ends."""
        passes = self.step.passes
        return np.maximum(self.saved - passes.of_norm - passes.of_layer * passes.of_stage, 0.0)

    def _of_first_layers(self) -> Iterator[Moment]:
        step, passes, root = self.step, self.step.passes, self.step.state.root_elements
        first, layer, second = self._input_elements, step.layer(0), step.layer(1)
        following = np.where(passes.of_stage > 1, step.reduction(step.rest(second)), 0.0)
        yield step.moment(
            "first layer", step.message(UnitElements(first)), communication=following, working=self._working(0),
            gathered=step.gathered(root + layer.elements, first, root + layer.elements + first),
            loss=passes.loss_beside_layers, gradients=self._gradients(self._unless_ended(layer)),
            activations=self._others + passes.of_layer + self._working(0),
        )  # fmt: skip
        if np.any(step.copied.common):
            # Without this copy, the moment "embedding" has more bytes.
            yield step.moment(
                "first layer, reduced", step.message(UnitElements(first)), loss=passes.loss_beside_layers,
                gathered=step.gathered(root, first, root + first), working=passes.stream,
                activations=self._others + passes.stream,
                gradients=self._gradients(self._unless_ended(UnitElements(0.0))),
                communication=step.reduction(step.rest(layer)) + step.divided(step.rest(layer)),
            ).only(step.copied.common > 0)  # fmt: skip
        ahead, both = step.ahead_of(layer), layer.plus(second)
        yield step.moment(
            "second layer", step.message(ahead), loss=passes.loss_beside_layers, working=self._working(1),
            communication=step.reduction(step.rest(step.layer(2))), gradients=self._gradients(self._unless_ended(both)),
            gathered=step.gathered(root + second.elements, ahead.elements, root + both.elements + first),
            activations=self._others + 2 * passes.of_layer + self._working(1),
        ).only(passes.of_stage > 3)  # fmt: skip

    @cached_property
    def _last_working(self) -> Column:
        """Bytes of the backward pass of the rank's last layer."""
        step, passes = self.step, self.step.passes
        return (
            np.where(step.state.dense_first > 0, passes.moe_peak_bytes, passes.backward_peak_bytes)
            if step.mixed
            else passes.backward_peak_bytes
        )

    def _working(self, place: int) -> Column:
        """Return the bytes of the backward pass of the rank's layer at a place, counted from 0."""
        step, last = self.step, self._last_working
        return np.where(step.state.dense_first > place, step.passes.dense_peak_bytes, last) if step.mixed else last

    def _unless_ended(self, unit: UnitElements) -> UnitElements:
        """Return a unit together with those whose gradients come after all layers'."""
        return unit.plus(self._inputs).plus(self.step.root)

    def _places(self) -> tuple[_Place, ...]:
        """Return the layers with experts of which one may have the fullest moment."""
        step, passes, layer = self.step, self.step.passes, self.step.moe
        everything = step.state.gathered / step.small
        saved, dense, ahead = self.saved - passes.of_norm, step.state.dense_first, step.ahead_of(self.step.moe)
        earlier, none = step.rest(layer), UnitElements(0.0)
        before = step.dense.where(dense > 0, self._inputs)
        one, two = (self._unless_ended(step.dense.times(dense).plus(layer.times(count))) for count in (1, 2))
        return (
            _Place("last layer", self._prefetched, everything, self.before, saved, none, passes.of_stage > 0),
            _Place("last layer but one", ahead, everything - layer.elements, self._before_last_but_one,
                   saved - passes.of_layer, earlier, passes.of_stage > 2),
            _Place("first layer", before, one.elements, self._gradients(one),
                   self._others + (dense + 1) * passes.of_layer, earlier, passes.of_stage > dense + 1),
            _Place("second layer", ahead, two.elements, self._gradients(two),
                   self._others + (dense + 2) * passes.of_layer, earlier, passes.of_stage > dense + 3),
        )  # fmt: skip

    def _of_experts(self) -> Iterator[Moment]:
        """FSDP2 reduces the gradients of experts that ranks share before the rest of their layer follows."""
        step, passes, experts = self.step, self.step.passes, self.step.moe._replace(common=0.0)
        common = step.state.root_elements + step.moe.common
        _, unreduced, result, reduction = self._reduced(experts, step.small * experts.trained.expert)
        sums = step.sums(experts) if self.first else 0.0
        with_result = result + np.where(step.reduces, 0.0, sums)
        for place in self._places():
            occurs, prefetched, loss = (experts.expert > 0) & place.occurs, place.prefetched, passes.loss_beside_layers
            if not np.any(occurs):
                continue
            if np.any(step.state.dense_first):
                yield step.moment(
                    f"{place.name}, experts", step.message(prefetched), activations=place.saved + passes.moe_peak_bytes,
                    gathered=step.gathered(common + experts.expert, prefetched.elements, place.still_gathered),
                    loss=loss, gradients=place.gradients, communication=step.reduction(place.earlier),
                    working=passes.moe_peak_bytes,
                ).only(occurs & (step.state.dense_first > 0))  # fmt: skip
            if np.any(passes.recompute_end_bytes):
                yield step.moment(
                    f"{place.name}, recomputed", np.where(step.by_unit, 0.0, step.message(prefetched)),
                    gathered=step.gathered(common + experts.expert, prefetched.elements, place.still_gathered),
                    gradients=place.gradients, activations=place.saved + passes.recompute_end_bytes, loss=loss,
                    communication=step.reduction(place.earlier), working=passes.recompute_end_bytes,
                ).only(occurs & (passes.recompute_end_bytes > 0))  # fmt: skip
            gathered = step.gathered(common, prefetched.elements, place.still_gathered - experts.expert)
            yield step.moment(
                f"{place.name}, experts reduced", step.message(prefetched), gathered=gathered,
                gradients=place.gradients + with_result, loss=loss,
                activations=place.saved + passes.expert_reduction_bytes + unreduced, communication=reduction,
                working=np.maximum(passes.expert_reduction_bytes + unreduced, 0.0),
            ).only(occurs)  # fmt: skip
            yield step.moment(
                f"{place.name}, after experts", step.message(prefetched), gathered=gathered, loss=loss,
                gradients=place.gradients + sums, activations=place.saved + passes.after_experts_bytes,
                communication=step.reduction(experts), working=np.maximum(passes.after_experts_bytes, 0.0),
            ).only(occurs)  # fmt: skip

    def _of_ends(self) -> Iterator[Moment]:
        """FSDP2 reduces the root's gradients first, then those of the embedding, whose inputs have no gradients."""
        step, passes, state = self.step, self.step.passes, self.step.state
        first, root = state.input_elements, state.root_elements
        # A frozen matrix has no gradient, and may not be gathered.
        rows, has_embedding = step.small * step.inputs.trained.common, first + state.tied_elements > 0
        missing = np.where(step.reduces, 1.0, 0.0)
        # Of a tied matrix there are both gradients and their sum; the head's counts as the loss's.
        working = rows + np.maximum(passes.stream, step.small * state.tied_elements) + step.small * state.tied_elements
        yield step.moment(
            "embedding", gathered=step.gathered(root + first, still_gathered=root + first),
            loss=passes.loss_beside_layers, working=working,
            gradients=self._gradients(step.inputs.plus(step.root)), activations=self._others + working,
            communication=step.reduction(step.rest(step.layer(0))),
        ).only(has_embedding)  # fmt: skip
        ended, unreduced, _, reduction = self._reduced(step.root, passes.loss_beside_layers)
        missing_units = step.inputs.plus(step.root.times(np.where(ended, 0.0, 1.0))).times(missing)
        yield step.moment(
            "head, reduced", gathered=step.gathered(first, still_gathered=first), loss=unreduced,
            gradients=self._gradients(missing_units), working=rows, activations=self._others + rows,
            communication=reduction,
        )  # fmt: skip
        ended, unreduced, _, reduction = self._reduced(step.inputs, rows)
        yield step.moment(
            "embedding, reduced", gathered=step.gathered(0.0, still_gathered=0.0),
            activations=self._others + unreduced, working=unreduced,
            gradients=self._gradients(step.inputs.times(missing * np.where(ended, 0.0, 1.0))), communication=reduction,
        ).only(first > 0)  # fmt: skip
