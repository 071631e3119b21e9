"""The moments of a step at which a rank of partool's runtime may hold most memory on an accelerator.

FSDP2 decides when parameters are gathered and gradients are reduced; names in brackets are those of its code,
``torch/distributed/fsdp/_fully_shard``. A unit is what it gathers at once: the embedding, a layer, or the *root*, which
is the final norm with the head. Only the root stays gathered between its forward and its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partool.cost.case import Column, Layouts, Mask, TrainingJob
from partool.cost.memory.moments import Moment
from partool.cost.memory.rank_parameters import BegunStages
from partool.cost.memory.states import States
from partool.cost.memory.work import PassBytes
from partool.cost.optimizer import working_bytes


def moments(job: TrainingJob, layouts: Layouts, state: States, done: PassBytes) -> list[Moment]:
    """Return the moments of a rank.

    The backward passes of a step's first micro-batch find no gradients yet, but in a pipeline they may find more
    micro-batches in flight than later ones do.
    """
    step = _Step.of(job, layouts, state, done)
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


def _some_begun(step: _Step, one: BegunStages) -> _Pass:
    """Return the passes when a part of a rank's stages has gradients."""
    done = step.done
    less = np.maximum(done.in_flight - one.in_flight, 0.0) * done.of_layer * done.layers
    of_loss = np.maximum(done.ending - one.ending, 0.0) * done.loss_held
    return _Pass(step, False, done.saved - less, of_loss, one.share * step.state.gradients_before, True)


@dataclass(frozen=True)
class _Step:
    """What the passes of a step have in common; each field is a column."""

    state: States
    done: PassBytes
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
    sent: Column
    """Bytes per element of a unit that is being gathered: the message, from which its parameters are copied."""
    ahead: float
    """Number of layers that are gathered while another one is in use."""
    apart: bool
    """True if each parameter is gathered into its own memory; then only shards are copied, where they are cast."""

    @classmethod
    def of(cls, job: TrainingJob, layouts: Layouts, state: States, done: PassBytes) -> _Step:
        small, zero = job.compute_bytes, np.asarray(layouts.zero)
        shards = np.where(zero > 0, layouts.shards * layouts.cp, 1)
        single = np.asarray(layouts.accumulation) == 1
        apart = job.controls.gather == "sequential"
        # Without a message only shards of another type than the gathered parameters' are copied, to be cast.
        cast = small / shards if small != job.master_bytes else 0.0
        sent = np.where(shards > 1, cast if apart else small, 0.0)
        return cls(
            state, done, small, job.master_bytes, shards, zero == 3, single, (zero >= 2) | single, sent,
            ahead=float(job.controls.prefetch), apart=apart,
        )  # fmt: skip

    @cached_property
    def pool(self) -> Column:
        """Most bytes of messages at once: one is received while the one before is copied out.

        torch's allocator keeps blocks by stream, and messages have streams of their own: when they are freed, their
        memory does not serve other tensors. The same goes for reduced gradients.
        """
        layer, first, root = self.state.layer_elements, self.state.input_elements, self.state.root_elements
        return self.sent * np.maximum(root + first, layer + np.maximum(layer, first))

    def gathered(self, in_use: Column, coming: Column = 0.0, left: Column | None = None) -> Column:
        """Return the bytes of gathered parameters; the arguments are numbers of elements.

        With ZeRO-3 these are the parameters ``in_use``, those that stay gathered, and, where parameters are gathered
        into their own memory, those that are ``coming``. Other stages release parameters in the backward pass of a
        step's last micro-batch only (``set_reshard_after_backward``); if it is the only one, all but ``left`` are gone.
        """
        others = self.state.gathered
        if left is not None:
            others = np.where(self.single, np.minimum(others, self.small * left), others)
        with_next = in_use + (coming * self.ahead if self.apart else 0.0)
        return np.where(self.stage3, self.small * with_next + self.state.kept_gathered, others)

    def message(self, elements: Column) -> Column:
        """Return the bytes of the message with which ZeRO-3 gathers a unit while another one is in use."""
        return np.where(self.stage3, self.sent * elements * self.ahead, 0.0)

    def reduction(self, elements: Column) -> Column:
        """Return the bytes of the buffer in which a unit's gradients are reduced (``reduce_scatter_input``).

        It lasts until the next unit's gradients are reduced (``reduce_scatter_states``).
        """
        return np.where(self.reduces, self.wide * elements, 0.0)

    def reduced(self, elements: Column) -> Column:
        """Return the bytes of a unit's reduced gradients; all its gradients have been freed when these are allocated.

        Those of later micro-batches are added to earlier ones at once.
        """
        return np.where(self.reduces, self.wide / self.shards * elements, 0.0)

    def moment(self, name: str, message: Column = 0.0, **parts: Column) -> Moment:
        """Return a moment, with what is there at all moments of the passes, and with ``message`` in communication."""
        done, state = self.done, self.state
        of_stream = np.where(self.reduces, parts["gradients"], 0.0)
        idle = np.maximum(self.pool - message, 0.0) + np.maximum(state.gradients_at_step - of_stream, 0.0)
        parts["communication"] = parts.get("communication", 0.0) + message + done.copies + done.received
        # Inputs of stages are in the buffers in which they were received.
        parts["activations"] = np.maximum(parts["activations"] - done.inputs, 0.0) + done.tables
        return Moment(name, leaving=state.leaving, idle=idle, **parts)


@dataclass(frozen=True)
class _Pass:
    """The passes of a step's first micro-batch, or of later ones."""

    step: _Step
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
        return [*self._of_loss(), *self._of_last_layers(), *self._of_first_layer(), *self._of_ends()]

    @property
    def _input_elements(self) -> Column:
        """Elements of the embedding, if the stage begins with it."""
        return np.where(self.of_first_stage, self.step.state.input_elements, 0.0)

    @property
    def _next_elements(self) -> Column:
        """Elements of the unit whose backward pass follows that of the last layer."""
        return np.where(self.step.done.of_stage > 1, self.step.state.layer_elements, self._input_elements)

    def _gradients(self, missing: Column) -> Column:
        """Return the bytes of gradients while those of ``missing`` elements have not been computed."""
        if not self.first:
            return self.before
        each = np.where(self.step.reduces, self.step.wide / self.step.shards, self.step.wide)
        others = np.where(self.of_first_stage, 0.0, self.step.done.layers - self.step.done.of_stage)
        missing = missing + others * self.step.state.layer_elements
        return np.maximum(self.step.state.gradients - each * missing, self.before)

    def _of_loss(self) -> Iterator[Moment]:
        step, done, layer = self.step, self.step.done, self.step.state.layer_elements
        root = step.state.root_elements
        # The last layer's message outlives the forward pass (``all_gather_state``); stages below 3 gather once a step.
        last = step.sent * layer if self.first else np.where(step.stage3, step.sent * layer, 0.0)
        there = np.where(done.loss > 0, 1.0, 0.0)
        parts = {"gradients": self.before, "freed": there * done.freed}
        yield step.moment(
            "loss", there * last, gathered=step.gathered(root), loss=done.loss - self.less, within=done.loss_within,
            activations=self.saved + done.result + done.handed, **parts,
        )  # fmt: skip
        yield step.moment(
            "loss, backward", step.message(layer), gathered=step.gathered(root, layer),
            loss=done.loss_backward - self.less, activations=self.saved + done.handed, **parts,
        )  # fmt: skip

    def _of_last_layers(self) -> Iterator[Moment]:
        step, done, layer = self.step, self.step.done, self.step.state.layer_elements
        root, everything, coming = step.state.root_elements, step.state.gathered / step.small, self._next_elements
        saved, working = self.saved - done.of_norm, done.at_work
        lone = step.stage3 & ((coming == 0) | (step.ahead == 0))
        if np.any(lone):
            # The layer's message is there until it is copied out; no message follows.
            own = np.where(root > 0, done.stream, 0.0) + done.handed
            yield step.moment(
                "last layer, gathered", step.sent * layer, gathered=step.gathered(root + layer), gradients=self.before,
                activations=saved + own, loss=done.loss_after, working=own,
            ).only(lone)  # fmt: skip
        yield step.moment(
            "last layer", step.message(coming), gathered=step.gathered(root + layer, coming), gradients=self.before,
            activations=saved + working, loss=done.loss_after, working=working,
        )  # fmt: skip
        # Where gradients accumulate, a unit's sums exist together with what is added to them.
        rest, matrices, result = saved - done.of_layer, step.small * layer, step.reduced(layer)
        first_sum = np.where(step.reduces, 0.0, step.wide * layer) if self.first else 0.0
        ended = result >= matrices
        own, message = np.where(ended, 0.0, matrices) + done.stream, np.where(ended, result, 0.0)
        yield step.moment(
            "last layer, reduced", step.message(coming), gathered=step.gathered(root, coming, everything - layer),
            gradients=self.before + first_sum + (message if self.first else 0.0), activations=rest + own,
            loss=done.loss_after, communication=step.reduction(layer) + (0.0 if self.first else message), working=own,
        )  # fmt: skip
        one = np.where(step.reduces, step.wide / step.shards, step.wide) * layer if self.first else 0.0
        yield step.moment(
            "last layer but one", step.message(layer), gathered=step.gathered(root + layer, layer, everything - layer),
            gradients=np.minimum(self.before + one, np.maximum(step.state.gradients, self.before)),
            activations=rest + working, loss=done.loss_after, communication=step.reduction(layer), working=working,
        ).only(done.of_stage > 2)  # fmt: skip

    @property
    def _others(self) -> Column:
        """Bytes that the other micro-batches in flight save when one backward pass ends."""
        done = self.step.done
        return np.maximum(self.saved - done.of_norm - done.of_layer * done.of_stage, 0.0)

    def _of_first_layer(self) -> Iterator[Moment]:
        step, done, state = self.step, self.step.done, self.step.state
        layer, first, root = state.layer_elements, self._input_elements, state.root_elements
        working, reduced = done.at_work, np.where(done.of_stage > 1, step.reduction(layer), 0.0)
        yield step.moment(
            "first layer", step.message(first), gathered=step.gathered(root + layer, first, root + layer + first),
            gradients=self._gradients(layer + first + root), activations=self._others + done.of_layer + working,
            loss=done.loss_after, communication=reduced, working=working,
        )  # fmt: skip

    def _of_ends(self) -> Iterator[Moment]:
        """FSDP2 reduces the root's gradients first, then those of the embedding, whose inputs have no gradients."""
        step, done, state = self.step, self.step.done, self.step.state
        layer, first, root = state.layer_elements, state.input_elements, state.root_elements
        rows, there = step.small * first, first + state.tied_elements > 0
        missing = np.where(step.reduces, 1.0, 0.0)
        # Of a tied matrix there are both gradients and their sum; the head's counts as the loss's.
        working = rows + np.maximum(done.stream, step.small * state.tied_elements) + step.small * state.tied_elements
        yield step.moment(
            "embedding", gathered=step.gathered(root + first, left=root + first), loss=done.loss_after, working=working,
            gradients=self._gradients(first + root), activations=self._others + working,
            communication=step.reduction(layer),
        ).only(there)  # fmt: skip
        result = step.reduced(root)
        ended = result >= done.loss_after
        yield step.moment(
            "head, reduced", gathered=step.gathered(first, left=first), loss=np.where(ended, 0.0, done.loss_after),
            gradients=self._gradients(missing * (first + np.where(ended, 0.0, root))), working=rows,
            activations=self._others + rows,
            communication=step.reduction(root) + (0.0 if self.first else np.where(ended, result, 0.0)),
        )  # fmt: skip
        result = step.reduced(first)
        ended = result >= rows
        own = np.where(ended, 0.0, rows)
        yield step.moment(
            "embedding, reduced", gathered=step.gathered(0.0, left=0.0), working=own,
            gradients=self._gradients(missing * np.where(ended, 0.0, first)), activations=self._others + own,
            communication=step.reduction(first) + (0.0 if self.first else np.where(ended, result, 0.0)),
        ).only(first > 0)  # fmt: skip
